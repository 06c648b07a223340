"""What the user asked to launch: a cluster file with the command line's changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from dtrain.messages.decode import Length
from dtrain.records import dataclass
from dtrain.spec.load import contents, parse_once, position
from dtrain.spec.model import ClusterFile
from dtrain.spec.source import MAX_SIZE


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked to launch."""

    file: str
    """The cluster file's path as the user gave it."""
    folder: str
    """Absolute path of the file's folder. Relative paths in the file start here."""
    text: Annotated[str, Length(MAX_SIZE)]
    """The file's content at the time of the request."""
    args: tuple[str, ...] = ()
    """Added to ``job.args``."""
    env: Mapping[str, str] | None = None
    """Overrides ``job.env``."""
    check: bool = True
    """Whether dtrain checks the hosts before it prepares them."""
    allocation: Annotated[str, re.compile(r"[0-9]{1,10}")] | None = None
    """The number of the Slurm job whose allocation the run uses; None to submit a job."""
    settings: tuple[str, ...] = ()
    """Change the file: see `dtrain.spec.settings.compose`."""

    @classmethod
    def of(cls, file: Path) -> Request:
        """A request for the cluster file ``file``. Raises UsageError if it cannot be read."""
        text = contents(file).decode(errors="surrogateescape")
        return cls(str(file), str(file.absolute().parent), text)

    @property
    def base(self) -> Path:
        return Path(self.folder)

    def spec(self) -> ClusterFile:
        """The file with the settings, and the added arguments and variables. Raises SpecError if it
        is invalid."""
        spec = parse_once(self.text, self.file, self.settings)
        job = replace(
            spec.job, args=(*spec.job.args, *self.args), env={**spec.job.env, **(self.env or {})}
        )
        return replace(spec, job=job)

    def place(self, key: str) -> str:
        """The place of a key such as ``cluster.nodes``: ``cluster.yaml:3:12``."""
        source = self.text.encode(errors="surrogateescape")
        return position(source, self.file, self.settings, key)

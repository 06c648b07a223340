"""What a run was launched with, kept in its folder: enough to find its processes again.

<home>/runs/<run>/run.json
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtrain.diagnostics import UsageError
from dtrain.launchplan import LaunchPlan, build
from dtrain.spec.load import parse
from dtrain.spec.model import ClusterFile

SCHEMA = 1
FILE = "run.json"


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asked to be launched."""

    file: str
    """Absolute path of the cluster file, from whose folder its relative paths start."""
    text: str
    """The file as it was then."""
    args: tuple[str, ...] = ()
    """Added to ``job.args``."""
    env: Mapping[str, str] | None = None
    """Over ``job.env``."""

    @property
    def base(self) -> Path:
        return Path(self.file).parent

    def spec(self) -> ClusterFile:
        """Raises SpecError for a file that is not right."""
        spec = parse(self.text.encode(errors="surrogateescape"), self.file)
        job = replace(
            spec.job,
            args=(*spec.job.args, *self.args),
            env={**spec.job.env, **(self.env or {})},
        )
        return replace(spec, job=job)


@dataclass(frozen=True, slots=True)
class Record:
    """A run that has begun. It holds no secret: those are named in the file, not given."""

    run: str
    request: Request
    port: int
    """Where the rendezvous is, or the first of the tasks' ports."""
    local_python: str
    """The interpreter that stands for ``python3`` on this machine."""
    started: float
    """Seconds since the epoch."""

    def plan(self) -> LaunchPlan:
        return build(
            self.request.spec(), run=self.run, port=self.port, local_python=self.local_python
        )

    def save(self, folder: Path) -> None:
        """Write, or replace, the folder's record; nobody sees half of it. Raises OSError."""
        draft = folder / f".{FILE}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump({"schema": SCHEMA, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Raises UsageError where the folder has no record that this version reads."""
        path = folder / FILE
        try:
            body = json.loads(path.read_text())
            if body.pop("schema") != SCHEMA:
                raise UsageError(f"{path}: written by another version of dtrain")
            request = body.pop("request")
            args = tuple(request.pop("args"))
            return cls(request=Request(args=args, **request), **body)
        except FileNotFoundError:
            raise UsageError(f"{path}: not found, so nothing can be told of this run") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from None

"""A working folder, this machine as a host, and a target folder on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.spec.model import Host, TransportName
from dtrain.sync import Patience, SyncResult, Tree, scan, send
from dtrain.transport.local import LocalConnection
from support.limits import HANG


@dataclass
class Folders:
    """``source`` is sent to ``workdir``."""

    source: Path
    workdir: Path
    connection: LocalConnection
    python: str = sys.executable
    exclude: Sequence[str] = ()
    transport: TransportName = "ssh"
    """What the host says it is; the connection is local, but compresses as for a network."""

    @property
    def host(self) -> Host:
        return Host(name="gpu01", address="gpu01", transport=self.transport, python=self.python)

    @property
    def container(self) -> Path:
        return self.workdir.with_name(self.workdir.name + ".dtrain")

    @property
    def snapshots(self) -> list[str]:
        return sorted(path.name for path in self.container.iterdir() if path.is_dir())

    def scan(self) -> Tree:
        return scan(self.source, self.exclude)

    def sync(
        self, tree: Tree | None = None, *, unused: float = 900, lock: float = HANG
    ) -> SyncResult:
        """Send the folder; a snapshot is kept for ``unused`` seconds without a process in it."""
        return send(
            self.connection,
            self.host,
            tree or self.scan(),
            str(self.workdir),
            patience=Patience(lock=lock, unused=unused),
        )

    def write(self, files: Mapping[str, str]) -> None:
        for name, content in files.items():
            write(self.source / name, content)


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def contents(root: Path) -> dict[bytes, bytes | str | None]:
    """Everything below ``root``: bytes of files, targets of links, None for folders."""
    top = os.fsencode(root)
    found: dict[bytes, bytes | str | None] = {}
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = os.path.join(folder, name)
            key = os.path.relpath(path, top)
            if os.path.islink(path):
                found[key] = os.fsdecode(os.readlink(path))
            elif os.path.isdir(path):
                found[key] = None
            else:
                with open(path, "rb") as file:
                    found[key] = file.read()
    return found

"""The files that a launch sends to its pods, in the ConfigMap of the job."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

from dtrain.diagnostics import UsageError
from dtrain.engines.kubernetes.script import RUNTIME, SYNCED
from dtrain.node.runtime_archive import runtime_archive
from dtrain.sync import Tree
from dtrain.sync.contents import File, local_path

MAX_BYTES = 900_000
"""Bytes of all files as they are sent: a ConfigMap has at most 1 MiB."""
MAX_SOURCE = 64 << 20
"""Bytes of files that are worth an archive."""


def config_files(tree: Tree | None, script: str) -> dict[str, str]:
    """The files by name, as base64. Raises UsageError if they are too large."""
    files = {RUNTIME: base64.b64encode(runtime_archive()).decode()}
    if tree is not None:
        if tree.size > MAX_SOURCE:
            raise _too_large(tree.size)
        files[SYNCED] = base64.b64encode(_archive(tree)).decode()
    size = len(script.encode()) + sum(len(base64.b64decode(text)) for text in files.values())
    if size > MAX_BYTES:
        raise _too_large(size)
    return files


def _too_large(size: int) -> UsageError:
    return UsageError(
        f"job.sync: {size >> 10} KiB are too much for a ConfigMap, which takes"
        f" {MAX_BYTES >> 10} KiB as an archive",
        hint="exclude more with job.sync.exclude, or put the code into the image or on a volume"
        " (cluster.kubernetes.claims) and remove job.sync",
    )


def _archive(tree: Tree) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for folder in tree.folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path, target in tree.links:
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
        for file in tree.files:
            data = _content(tree, file)
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(data), 0o755 if file.executable else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _content(tree: Tree, file: File) -> bytes:
    path = Path(os.fsdecode(local_path(os.fsencode(tree.source), file.path)))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"job.sync: {file.path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise UsageError(
            f"job.sync: {file.path} has changed since the launch began", hint="launch again"
        )
    return data

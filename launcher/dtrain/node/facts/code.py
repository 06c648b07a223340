"""Digests of the script and of the code in its folder."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib

from dtrain.node.facts.files import expand, why_unsafe
from dtrain.node.launchers import launcher_of
from dtrain.node.revision import CODE
from dtrain.node.trust import Trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder, JobOrder

MAX_FILES = 400
MAX_CODE = 1 << 20


def script(request: GatherOrder) -> Json:
    """The digests of the script and of the code in the working folder."""
    workdir = expand(request["workdir"])
    found: Json = {
        "workdir": workdir,
        "workdir_exists": os.path.isdir(workdir),
        "unsafe": why_unsafe_to_run(request),
    }
    if request["script"]:
        path = os.path.normpath(os.path.join(workdir, request["script"]))
        found.update(path=path, exists=os.path.isfile(path))
        if found["exists"]:
            found["digest"] = digest(path)
    if request["shell_script"]:
        path = os.path.join(workdir, os.path.expanduser(request["shell_script"]))
        found["launcher"] = launcher_of(path)
    # A home folder contains many files that are not part of the job.
    if request["code"] and workdir != os.path.expanduser("~"):
        found["code"] = dict(code_below(workdir))
    return found


def why_unsafe_to_run(request: JobOrder) -> Json | None:
    """Why a launch would refuse to run the job's code. None if it would not."""
    if request.get("any_owner"):
        return None

    def check(trust: Trust) -> None:
        workdir = os.fsencode(expand(request["workdir"]))
        trust.check_folder(workdir)
        if script := request.get("script"):
            trust.check_script(os.path.join(workdir, os.fsencode(script)))

    return why_unsafe(request, "job.workdir", check)


def digest(path: str) -> str:
    """The CRC-32: nobody forges it here, and importing hashlib takes longer than importing this
    whole program."""
    found = 0
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found = zlib.crc32(block, found)
    return "%08x" % found


def code_below(workdir: str) -> Iterator[tuple[str, str]]:
    left = MAX_FILES
    for place, folders, files in os.walk(workdir):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__pycache__")))
        if place[len(workdir) :].count("/") >= 3:
            folders.clear()
        for name in sorted(name for name in files if name.endswith(CODE)):
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                status = os.stat(path)
                # Opening a FIFO would block.
                if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_CODE:
                    yield os.path.relpath(path, workdir), digest(path)
                    left -= 1
            if left == 0:
                return

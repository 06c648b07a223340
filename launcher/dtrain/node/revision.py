"""The Git commit of a folder's code, and the files that differ from it.

Shipped to nodes, and the launcher imports it too: Python 3.8, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import zlib
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Callable

    Json = dict[str, Any]

GIT_SECONDS = 10.0
"""Seconds for Git to compare the files of a repository."""
KILL_SECONDS = 1.0
"""Seconds for it to end after KILL."""
MAX_OUTPUT = 1 << 22
"""Bytes of Git's answer that are used."""
MAX_CHANGED = 100
"""Changed files that are named, and read."""
MAX_PATH = 500
"""Characters of a name."""
MAX_READ = 1 << 20
"""Bytes of a changed file that its part of the digest is from."""
MAX_ENTRIES = 5000
"""Entries of a changed folder that are searched for Python files: it may be a data set."""
CODE = (".py", ".yaml", ".yml", ".json", ".toml", ".sh", ".cfg", ".ini")
"""Ends of the names of code."""
_WORDS_BEFORE_PATH = {b"1": 8, b"2": 9, b"u": 10, b"?": 1}
"""By the kind of a line, see "Porcelain Format Version 2" in git-status(1)."""


def started(argv: list[bytes]) -> subprocess.Popen[bytes]:
    """A program whose output we read, in a process group of its own. Raises OSError."""
    import subprocess  # slow to import, and rarely needed

    # A hook of Git has variables that name its own repository.
    env = {name: value for name, value in os.environb.items() if not name.startswith(b"GIT_")}
    # In a session of its own, Ctrl-C does not end it half-way.
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def revision(
    folder: bytes, start: Callable[[list[bytes]], subprocess.Popen[bytes]] = started
) -> Json | None:
    """The ``commit`` that is checked out in ``folder``, the ``changed`` and new files of its
    repository, how many ``more`` there are, and a ``digest`` of their content. None if there is no
    repository, no commit or no Git.

    ``start`` starts a program as `started` does.
    """
    top = _repository(folder)
    if top is None:
        return None
    # It writes nothing, and does not start the file monitor of the repository.
    command = [b"git", b"--no-optional-locks", b"-c", b"core.fsmonitor=false", b"-C", top]
    command += [b"status", b"--porcelain=v2", b"--branch", b"-z", b"--untracked-files=normal"]
    try:
        process = start(command)
    except OSError:
        return None
    return _read(top, _answer(process))


def _repository(folder: bytes) -> bytes | None:
    """The repository that has ``folder``: without one, no program needs to start."""
    here = os.path.realpath(folder)
    while not os.path.exists(os.path.join(here, b".git")):
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above
    return here


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    from subprocess import TimeoutExpired

    try:
        return process.communicate(timeout=GIT_SECONDS)[0]
    except TimeoutExpired:
        # A wrapper of Git has children. One that waits for a file server does not end at once.
        with contextlib.suppress(ProcessLookupError, TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(KILL_SECONDS)
        return b""


def _read(top: bytes, answer: bytes) -> Json | None:
    commit, renamed = "", False
    changed: list[bytes] = []
    for line in answer[:MAX_OUTPUT].split(b"\0"):
        kind = line[:1]
        if renamed:  # the old name, which follows the new one
            renamed = False
        elif line.startswith(b"# branch.oid "):
            commit = line[len(b"# branch.oid ") :].decode("ascii", "replace")[:64]
        elif kind in _WORDS_BEFORE_PATH:
            path = line.split(b" ", _WORDS_BEFORE_PATH[kind])[-1]
            # Other files that Git does not know are most often output.
            if kind != b"?" or _is_code(top, path):
                changed.append(path)
            renamed = kind == b"2"
    if not commit or commit == "(initial)":
        return None
    digest = 0
    for path in changed[:MAX_CHANGED]:
        digest = zlib.crc32(path + b"\0" + _content(os.path.join(top, path)), digest)
    return {
        "commit": commit,
        "changed": [_shown(path) for path in changed[:MAX_CHANGED]],
        "more": max(0, len(changed) - MAX_CHANGED),
        "digest": "%08x" % digest if changed else "",
    }


def _is_code(top: bytes, path: bytes) -> bool:
    """Whether a new file, or a new folder, is code. Git names no files of new folders."""
    if path.endswith(b"/"):
        return bool(_python_files(os.path.join(top, path)))
    return path.endswith(tuple(map(os.fsencode, CODE)))


def _python_files(folder: bytes) -> list[bytes]:
    found, waiting, left = [], [folder], MAX_ENTRIES
    while waiting and left:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in islice(entries, left):
                left -= 1
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith(b"."):
                        waiting.append(entry.path)
                elif entry.name.endswith(b".py"):
                    found.append(entry.path)
    return sorted(found)


def _content(path: bytes) -> bytes:
    """The beginning of a file; of a symbolic link, its target; of a folder, which is new or a
    submodule, a digest of its Python files. Empty for anything else."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return os.readlink(path)
        if stat.S_ISREG(mode):  # opening a FIFO would block
            with open(path, "rb") as file:
                return file.read(MAX_READ)
        if stat.S_ISDIR(mode):
            digest = 0
            for found in _python_files(path):
                digest = zlib.crc32(found[len(path) :] + b"\0" + _content(found), digest)
            return b"%08x" % digest
    except OSError:
        pass
    return b""


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")[:MAX_PATH]

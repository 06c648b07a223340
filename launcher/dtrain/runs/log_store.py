"""The run's folder on the launching machine: every worker's output, byte for byte.

    <home>/runs/<run>/run.json                          what was launched
    <home>/runs/<run>/journal.jsonl                     what happened
    <home>/runs/<run>/launcher                          locked by the process in charge
    <home>/runs/<run>/telemetry/                        see `dtrain.runs.telemetry`
    <home>/runs/<run>/logs/<host>/<role>-<index>.out    stdout
    <home>/runs/<run>/logs/<host>/<role>-<index>.err    stderr
    <home>/runs/<run>/logs-2/…                          the second attempt, and so on

``<home>`` is ``$DTRAIN_HOME``, or ``~/.dtrain``. Folders are 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dtrain.diagnostics import DtrainError, ExitCode, UsageError
from dtrain.launchplan import names
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import ProtocolError, excerpt
from dtrain.node.trust import Trust, UnsafeError
from dtrain.records import dataclass
from dtrain.runs.stored_file import RUN_NAME, check_host_name, open_stored

_LOGS_NAME = re.compile(r"logs(?:-([0-9]{1,7}))?")
_STREAM_NAME = re.compile(r"[a-z]+-[0-9]{1,9}\.(?:out|err)")
_STAMP = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{6}")
"""What `dtrain.runs.record.run_name` adds to the name of the job."""
MAX_PID = 1 << 22
"""The largest process id that Linux allows."""
_NO_SIGNALS = "no signals"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class StorageError(DtrainError):
    """This machine cannot store the run's files; the message names the file."""

    exit_code = ExitCode.NODE_FAILED


@dataclass(frozen=True, slots=True)
class Stream:
    """One output file of one process; its bytes are in ``path`` on this machine."""

    host: str
    role: str
    index: int
    rank: int | None
    fd: Literal["stdout", "stderr"]
    path: Path

    @property
    def label(self) -> str:
        return names.label(self.role, self.index, self.rank)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder on this machine."""

    path: Path
    attempt: int = 1
    """The attempt whose logs `logs`, `sizes` and `stream` refer to."""

    @classmethod
    def create(cls, run: str) -> RunFolder:
        """A new folder for ``run``.

        Raises FileExistsError if the run has one, and StorageError if it cannot be created.
        """
        folder = cls(_runs() / _checked(run))
        try:
            runs, _ = Trust().open_folder(os.fsencode(_runs()), created=[])
            try:
                os.mkdir(run, 0o700, dir_fd=runs)
                os.mkdir(f"{run}/{folder.logs.name}", 0o700, dir_fd=runs)
            finally:
                os.close(runs)
        except FileExistsError:
            raise
        except NotADirectoryError:
            raise StorageError(
                f"{folder.path}: cannot make this folder: a file is in the way",
                hint="remove the file, or name another folder in DTRAIN_HOME",
            ) from None
        except OSError as error:
            raise storage_error(folder.path, error) from None
        return folder

    @classmethod
    def find(cls, name: str) -> RunFolder:
        """The run with that name; else the only one whose name starts with it, or the latest one of
        the job with that name.

        Raises UsageError, and StorageError if another user can change its files.
        """
        if RUN_NAME.fullmatch(name) and _trusted(_runs() / name):
            return cls(_runs() / name)
        like = cls.named(name)
        latest = max(like, key=lambda folder: folder.name, default=None)
        if latest is not None and (len(like) == 1 or latest.is_of(name)):
            return latest
        if like:
            names = ", ".join(folder.name for folder in like[-3:])
            raise UsageError(f"{len(like)} runs begin with {name!r}", hint=f"the latest: {names}")
        is_file = name.endswith((".yaml", ".yml"))
        raise UsageError(
            f"no run {excerpt(name)!r} on this machine",
            hint="name a run, not a file: " * is_file + "`dtrain ps --all` lists all runs",
        )

    @classmethod
    def named(cls, name: str) -> list[RunFolder]:
        """The runs of the job with that name, or if there are none, those whose names start with
        it; oldest first. Raises StorageError."""
        like = [folder for folder in cls.all() if name and folder.name.startswith(name)]
        return [folder for folder in like if folder.is_of(name)] or like

    def is_of(self, job: str) -> bool:
        """Whether it is a run of the job with that name."""
        return self.name.startswith(job) and bool(_STAMP.fullmatch(self.name, len(job)))

    @classmethod
    def all(cls) -> list[RunFolder]:
        """The runs on this machine, oldest first.

        Raises StorageError if another user can change them.
        """
        if not _trusted(_runs()):
            return []
        found: list[tuple[float, Path]] = []
        for entry in _entries(_runs()):
            if RUN_NAME.fullmatch(entry.name):
                # Another process may remove it at the same time.
                with contextlib.suppress(OSError):
                    if entry.is_dir():
                        found.append((entry.stat().st_mtime, _runs() / entry.name))
        return [cls(path) for _, path in sorted(found)]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def started(self) -> float:
        """When the folder last changed, in seconds since the epoch. Used as the start time of a
        run whose record cannot be read."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def claim(self, *, signals: bool = True) -> Claim | None:
        """Take charge of the run. None if another process is in charge. ``signals``: whether a
        signal stops this process cleanly.

        Raises StorageError if the folder cannot be written.
        """
        try:
            fd = open_stored(self.path / "launcher", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise storage_error(self.path, error) from None
        for _ in range(10):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A fixed length: readers never see the end of an older entry, or nothing.
                entry = f"{os.getpid():<20}\n{_this_machine()}" + f"\n{_NO_SIGNALS}" * (not signals)
                os.pwrite(fd, b"%-400b\n" % entry.encode(errors="replace")[:400], 0)
            except BlockingIOError:
                # The lock may belong to a reader such as `in_charge`.
                time.sleep(0.01)
            except OSError as error:
                os.close(fd)
                raise storage_error(self.path, error) from None
            else:
                return Claim(fd)
        os.close(fd)
        return None

    def in_charge(self) -> int | None:
        """The id of the process in charge of the run, if there is one.

        Raises StorageError if another user can change the lock file.
        """
        holder = self.holder()
        return holder.pid if holder is not None else None

    def holder(self) -> Holder | None:
        """The process in charge of the run, if there is one. Raises StorageError."""
        try:
            fd = open_stored(self.path / "launcher", os.O_RDONLY)
        except UnsafeError as error:
            raise storage_error(self.path, error) from None
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(fd, 401).decode(errors="replace")
            pid, machine, mark, *_ = (part.strip() for part in f"{text}\n\n".split("\n"))
            # 1 is never a launcher, and 0 and negative numbers would signal whole groups.
            if not (pid.isdecimal() and 1 < int(pid) <= MAX_PID):
                return None
            here = machine in ("", _this_machine())
            elsewhere = "" if here else excerpt(machine.split(" ")[0])
            return Holder(int(pid), elsewhere, signals=mark != _NO_SIGNALS)
        except OSError:
            return None
        finally:
            os.close(fd)
        return None

    @property
    def logs(self) -> Path:
        """The logs of this attempt. The folder is created with the first file in it."""
        return self.path / ("logs" if self.attempt == 1 else f"logs-{self.attempt}")

    def attempts(self) -> list[RunFolder]:
        """The attempts that have logs here, oldest first."""
        found = (_LOGS_NAME.fullmatch(entry.name) for entry in _entries(self.path))
        numbers = sorted(int(name[1] or 1) for name in found if name)
        return [replace(self, attempt=number) for number in numbers]

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    def sizes(self, plan: LaunchPlan) -> dict[Stream, int]:
        """Every stream of this attempt with its size in bytes: by node rank, by number, stdout
        first. Ignores other files."""
        places = {host: place for place, host in enumerate(plan.host_names)}
        found: dict[Stream, int] = {}
        for folder in sorted(
            _entries(self.logs), key=lambda one: places.get(one.name, len(places))
        ):
            if not folder.is_dir(follow_symlinks=False):
                continue
            files = {
                self.stream(folder.name, file.name, ranked=plan.job.ranked): file
                for file in _entries(self.logs / folder.name)
                if _STREAM_NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False)
            }
            for stream in sorted(files, key=lambda one: (one.role, one.index, one.fd == "stderr")):
                with contextlib.suppress(OSError):
                    found[stream] = files[stream].stat(follow_symlinks=False).st_size
        return found

    def stream(self, host: str, name: str, *, ranked: bool) -> Stream:
        """The stream that ``host`` calls ``name``: ``worker-3.err``, or ``rank-3.err`` of a worker
        that torchrun starts. ``ranked``: see `Job.ranked`.

        Raises ValueError if the names, which come from outside, do not name a file in this run's
        folder.
        """
        check_host_name(host)
        if not _STREAM_NAME.fullmatch(name):
            raise ValueError(f"not the name of a worker's output: {name!r}")
        fd: Literal["stdout", "stderr"] = "stdout" if name.endswith(".out") else "stderr"
        role, index = names.parsed(name.partition(".")[0])
        role = "worker" if role == "rank" else role
        rank = index if ranked and role == "worker" else None
        return Stream(host, role, index, rank, fd, self.logs / host / name)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that is in charge of a run."""

    pid: int
    elsewhere: str = ""
    """The name of its machine; empty if it is this one. Process ids of others mean nothing here."""
    signals: bool = True
    """Whether a signal stops it cleanly, instead of killing it."""


class Claim:
    """The right to control a run, held until `release` or until this process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        os.close(self._fd)


class LogWriter:
    """Stores one stream's bytes. Not for use by two threads at the same time.

    Each piece is in the file when `append` returns, so a killed launcher loses nothing. The file
    is open only during `append`: hundreds of hosts have more streams than a process may open.
    """

    def __init__(self, stream: Stream) -> None:
        """Keeps an existing file's content. Raises StorageError if it cannot create the file."""
        self.path = stream.path
        try:
            self.path.parent.parent.mkdir(mode=0o700, exist_ok=True)
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = open_stored(self.path, os.O_WRONLY | os.O_CREAT)
            try:
                self.size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(self.path, error) from None

    def append(self, offset: int, payload: bytes) -> int:
        """Store ``payload``, the stream's bytes from ``offset`` on. Returns the file's new size.

        Skips bytes that are stored already, so a piece may be sent twice. Raises ProtocolError for
        a gap, and StorageError if the file cannot be written; bytes written before the error
        count, and the same piece may be appended again.
        """
        if offset > self.size:
            raise ProtocolError(
                f"{self.path.name}: bytes {self.size} to {offset} of the stream are missing"
            )
        new = memoryview(payload)[self.size - offset :]
        if not new:
            return self.size
        try:
            # If a pipe has replaced the file, fail instead of waiting.
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                while new:
                    # Written at its offset, not appended: if two launchers are attached to one
                    # run, they write the same bytes to the same place.
                    written = os.pwrite(fd, new, self.size)
                    self.size += written
                    new = new[written:]
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(self.path, error) from None
        return self.size


def tail(path: Path, max_bytes: int) -> bytes:
    """The last ``max_bytes`` bytes of a file; empty if it is missing."""
    try:
        with os.fdopen(open_stored(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes)
    except OSError:
        return b""


def changed_since(path: Path, then: float) -> bool:
    """Whether a file has changed after ``then``, in seconds since the epoch."""
    try:
        return path.stat(follow_symlinks=False).st_mtime > then
    except OSError:
        return False


def home() -> Path:
    """``$DTRAIN_HOME`` or ``~/.dtrain``, absolute. Raises UsageError if there is no such home
    folder."""
    named = os.environ.get("DTRAIN_HOME") or "~/.dtrain"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError:
        raise UsageError(
            f"{named}: this machine has no such home folder",
            hint="set DTRAIN_HOME to a folder for dtrain's files",
        ) from None


def _this_machine() -> str:
    """Identifies the machine whose process ids this process sees, beginning with its name."""
    kernel = []
    with contextlib.suppress(OSError):
        kernel = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        kernel.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join([platform.node() or "?", *kernel])


def _runs() -> Path:
    return home() / "runs"


def _trusted(folder: Path) -> bool:
    """Whether a folder exists. Raises StorageError if another user can change it."""
    try:
        fd, _ = Trust().open_folder(os.fsencode(folder))
    except UnsafeError as error:
        raise storage_error(folder, error) from None
    except OSError:
        return False
    os.close(fd)
    return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _checked(run: str) -> str:
    if not RUN_NAME.fullmatch(run):
        raise ValueError(f"not a run's name: {run!r}")
    return run


def storage_error(path: Path, error: OSError) -> StorageError:
    """The error for a file of a run's folder that cannot be written."""
    if isinstance(error, UnsafeError):
        return StorageError(f"this machine: {error.reason}", hint=error.hint("DTRAIN_HOME"))
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        hint = "free some space on this machine, or name a folder on another disk in DTRAIN_HOME"
    elif error.errno in _NO_DESCRIPTOR:
        hint = "raise the limit on open files (ulimit -n), or close other programs"
    elif isinstance(error, FileNotFoundError):
        hint = "the run's folder was removed during the run"
    else:
        hint = "name a folder that you can write to in DTRAIN_HOME"
    return StorageError(f"this machine: {path}: cannot store the run's files: {reason}", hint=hint)

"""The run's folder on the launching machine.

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
import fcntl
import os
import platform
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dtrain.diagnostics import UsageError
from dtrain.launchplan import names
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import excerpt
from dtrain.node.descriptors import closing_fd
from dtrain.node.trust import Trust, UnsafeError
from dtrain.records import dataclass
from dtrain.runs.log_store import Stream
from dtrain.runs.storage import StorageError, home, storage_error, storing
from dtrain.runs.stored_file import RUN_NAME, check_host_name, open_stored

_LOGS_NAME = re.compile(r"logs(?:-([0-9]{1,7}))?")
_STREAM_NAME = re.compile(r"[a-z]+-[0-9]{1,9}\.(?:out|err)")
_STAMP = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{6}")
"""What `dtrain.runs.record.run_name` adds to the name of the job."""
MAX_PID = 1 << 22
"""The largest process id that Linux allows."""
_NO_SIGNALS = "no signals"


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
        if not RUN_NAME.fullmatch(run):
            raise ValueError(f"not a run's name: {run!r}")
        folder = cls(_runs() / run)
        try:
            with closing_fd(Trust().open_folder(os.fsencode(_runs()), created=[])[0]) as runs:
                os.mkdir(run, 0o700, dir_fd=runs)
                os.mkdir(f"{run}/{folder.logs.name}", 0o700, dir_fd=runs)
        except FileExistsError:
            raise
        except NotADirectoryError as error:
            raise StorageError(
                f"cannot make {folder.path}: a file is in the way: {os.fsdecode(error.filename)}",
                hint="remove the file, or name another folder in DTRAIN_HOME",
            ) from None
        except OSError as error:
            with contextlib.suppress(OSError):
                folder.path.rmdir()  # it is empty, if it is there
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
        with storing(self.path):
            fd = open_stored(self.path / "launcher", os.O_RDWR | os.O_CREAT)
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
            # 0 would signal a whole group. A launcher in a container may be process 1 there.
            if not (machine and pid.isdecimal() and 0 < int(pid) <= MAX_PID):
                return None
            elsewhere = "" if machine == _this_machine() else excerpt(machine.split(" ")[0])
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

    def machines(self) -> set[str]:
        """The hosts of all attempts that have logs here."""
        return {entry.name for one in self.attempts() for entry in _entries(one.logs)}

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

    def offsets(self, plan: LaunchPlan) -> dict[str, dict[str, int]]:
        """The sizes of this attempt's streams in bytes, by host and by file name."""
        found: dict[str, dict[str, int]] = {}
        for stream, size in self.sizes(plan).items():
            found.setdefault(stream.host, {})[stream.path.name] = size
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
        return Stream(host, role, index, rank, fd, self.logs / host / name, self.attempt)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that is in charge of a run."""

    pid: int
    elsewhere: str = ""
    """The name of its machine; empty if it is this one. Process ids of others mean nothing here."""
    signals: bool = True
    """Whether a signal stops it cleanly, instead of killing it."""


class Claim:
    """The right to control a run, held until `close` or until this process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        # Closing alone is not enough: a process that this one has forked meanwhile, such as the
        # workers of a pool in a program that launches, has the file open, too.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


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
        Trust().check_folder(os.fsencode(folder))
    except UnsafeError as error:
        raise storage_error(folder, error) from None
    except OSError:
        return False
    return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []

"""The commands of Slurm that dtrain uses.

Shipped to login nodes: Python 3.8, standard library only.
"""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import os
import re
import subprocess

from dtrain.node.agent.folder import expand
from dtrain.node.agent.wire import raw, shown, write_all
from dtrain.node.agent.worker_files import read_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

    from dtrain.node.agent.wire import Json

JOB_FILE = b"job-id"
SCRIPT = b"job.sbatch"
LIMIT = 60.0
"""Seconds for one command. A busy controller may take as long as that."""
FAILED, NOT_FOUND, TIMED_OUT = 1, 127, 124
MAX_TEXT = 16 << 10

_JOB = re.compile(r"([0-9]{1,10})(?:;[\w.-]*)?")


class CommandResult:
    """How a command ended: ``text`` is its output, or with a ``status`` other than 0 its error."""

    def __init__(self, command: str, status: int, text: str) -> None:
        self.command = command
        self.status = status
        self.text = text


def submit(order: Json, folder: bytes) -> CommandResult:
    """Submit the job's script. ``text`` is the job's number."""
    script = os.path.join(folder, SCRIPT)
    output = shown(os.path.join(folder, b"job.out"))
    command = ["sbatch", "--parsable", "--job-name=" + order["run"],
               "--output=" + re.sub(r"([\\%])", r"\\\1", output), shown(script)]  # fmt: skip
    try:
        _make_private(folder)
        with _locked(folder) as lock:
            _write(script, raw(order["script"]))
            _write(os.path.join(folder, b"runtime.zip"), binascii.a2b_base64(order["runtime"]))
            hidden = order["hidden"]
            inherited = {key: value for key, value in os.environ.items() if key not in hidden}
            environment = dict(inherited, **order["environment"])
            # It holds the lock too: it goes on if this program is killed.
            answer = _run(command, expand(order["workdir"]), environment, (lock,))
            if answer.status == TIMED_OUT:
                queued = _queued(order["run"])
                if queued.text and not queued.status:
                    answer = queued
            if answer.status:
                return answer
            # A site's plugins may print more.
            jobs = [found[1] for found in map(_JOB.fullmatch, answer.text.split("\n")) if found]
            if not jobs:
                reason = "it printed no job number: " + answer.text
                return CommandResult(answer.command, FAILED, reason)
            _write(os.path.join(folder, JOB_FILE), jobs[-1].encode())
    except OSError as error:
        return CommandResult(" ".join(command), FAILED, _words(error))
    return CommandResult(answer.command, 0, jobs[-1])


def find_job(run: str, folder: bytes) -> CommandResult:
    """``text`` is the number of the run's job; empty if it was not submitted. Waits for another
    program that is submitting it."""
    none = CommandResult("", 0, "")
    if not os.path.isdir(folder):
        return none
    with _locked(folder):
        saved = (read_regular(os.path.join(folder, JOB_FILE), 64) or b"").decode("ascii", "replace")
        if _JOB.fullmatch(saved):
            return CommandResult("", 0, saved)
        if not os.path.exists(os.path.join(folder, SCRIPT)):
            return none
        # That program may have been killed between the submission and the file.
        return _queued(run)


def _queued(run: str) -> CommandResult:
    """The last job with the name ``run``; an empty ``text`` if there is none."""
    answer = _run(["squeue", "--noheader", "--states=all", "--format=%i", "--name=" + run])
    if not answer.status:
        jobs = list(filter(_JOB.fullmatch, answer.text.split()))
        answer.text = jobs[-1] if jobs else ""
    return answer


@contextlib.contextmanager
def _locked(folder: bytes) -> Iterator[int]:
    """One program at a time submits a run, on whatever login node."""
    fd = os.open(os.path.join(folder, b"lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _make_private(folder: bytes) -> None:
    # Only here: the job inherits the umask of sbatch.
    before = os.umask(0o077)
    try:
        os.makedirs(folder, exist_ok=True)
    finally:
        os.umask(before)


def show_job(job: str) -> CommandResult:
    """What the controller says about a job; an empty ``text`` if it does not know the job."""
    answer = _run(["scontrol", "show", "job", "--oneliner", job])
    if answer.status and "Invalid job id" in answer.text:
        return CommandResult(answer.command, 0, "")
    return answer


def cancel(job: str, kill: bool) -> CommandResult:
    """End a job. ``kill``: without TERM first."""
    options = ["--signal=KILL", "--full"] if kill else []
    if kill:
        _run(["scancel", job])  # it may not have started
    return _run(["scancel", *options, job])


def _run(
    command: list[str],
    folder: bytes | None = None,
    environment: dict[str, str] | None = None,
    files: tuple[int, ...] = (),
) -> CommandResult:
    """``files``: descriptors that the command inherits."""
    text = " ".join(command)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CommandResult(text, TIMED_OUT, "no answer within %d s" % LIMIT)
    except OSError as error:
        # A busy login node may refuse to start another process.
        missing = isinstance(error, FileNotFoundError) and error.filename == command[0]
        words = "%s: not found" % command[0] if missing else _words(error)
        return CommandResult(text, NOT_FOUND if missing else FAILED, words)
    said = shown(done.stderr if done.returncode else done.stdout)
    return CommandResult(text, done.returncode, said.strip()[:MAX_TEXT])


def _words(error: OSError) -> str:
    name = error.filename if isinstance(error.filename, str) else shown(error.filename or b"")
    return "%s: %s" % (name, error.strerror)


def _write(path: bytes, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)

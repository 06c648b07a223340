"""The commands of Slurm that dtrain uses.

Shipped to login nodes: Python 3.8, standard library only.
"""

from __future__ import annotations

import binascii
import os
import re
import subprocess

from dtrain.node.agent.folder import expand
from dtrain.node.agent.wire import raw, shown, write_all
from dtrain.node.agent.worker_files import read_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    command = ["sbatch", "--parsable", "--job-name=" + order["run"],
               "--output=" + shown(os.path.join(folder, b"job.out")), shown(script)]  # fmt: skip
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _write(script, raw(order["script"]))
        _write(os.path.join(folder, b"runtime.zip"), binascii.a2b_base64(order["runtime"]))
        inherited = {key: value for key, value in os.environ.items() if key not in order["hidden"]}
        environment = dict(inherited, **order["environment"])
        answer = _run(command, expand(order["workdir"]), environment)
        if answer.status:
            return answer
        # A site's plugins may print more.
        jobs = [found[1] for found in map(_JOB.fullmatch, answer.text.split("\n")) if found]
        if not jobs:
            return CommandResult(answer.command, FAILED, "it printed no job number: " + answer.text)
        _write(os.path.join(folder, JOB_FILE), jobs[-1].encode())
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else shown(error.filename or b"")
        return CommandResult(" ".join(command), FAILED, "%s: %s" % (name, error.strerror))
    return CommandResult(answer.command, 0, jobs[-1])


def find_job(run: str, folder: bytes) -> str | None:
    """The number of the run's job, if it was submitted."""
    if not os.path.isdir(folder):
        return None
    saved = (read_regular(os.path.join(folder, JOB_FILE), 64) or b"").decode("ascii", "replace")
    if _JOB.fullmatch(saved):
        return saved
    # The connection may have broken between the submission and the file.
    answer = _run(["squeue", "--noheader", "--states=all", "--format=%i", "--name=" + run])
    jobs = [] if answer.status else list(filter(_JOB.fullmatch, answer.text.split()))
    return jobs[-1] if jobs else None


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
    command: list[str], folder: bytes | None = None, environment: dict[str, str] | None = None
) -> CommandResult:
    text = " ".join(command)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=LIMIT,
            check=False,
        )
    except FileNotFoundError as error:
        if error.filename == command[0]:
            return CommandResult(text, NOT_FOUND, "%s: not found" % command[0])
        raise
    except subprocess.TimeoutExpired:
        return CommandResult(text, TIMED_OUT, "no answer within %d s" % LIMIT)
    said = shown(done.stderr if done.returncode else done.stdout)
    return CommandResult(text, done.returncode, said.strip()[:MAX_TEXT])


def _write(path: bytes, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)

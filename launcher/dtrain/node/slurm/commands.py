"""The commands of Slurm that dtrain uses."""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import os
import re
import subprocess
import time

from dtrain.node.agent.folder import expand
from dtrain.node.agent.wire import raw, shown, write_all
from dtrain.node.agent.worker_files import read_regular
from dtrain.node.descriptors import closing_fd
from dtrain.node.trust import Trust, UnsafeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Mapping

    from dtrain.node.slurm.orders import SubmitOrder

JOB_FILE = b"job-id"
SCRIPT = b"job.sbatch"
UNANSWERED = b"unanswered"
"""A file with what sbatch said when the controller may have had its request nevertheless."""
MAY_COME = 600.0
"""Seconds after its submission in which the controller may still accept a job."""
OUTPUT = b"job.out"
LAST = b"last-attempt"
"""A file whose presence keeps the script from starting the job again."""
STATUS = b"status"
"""A file with the exit status of a script that has ended."""
LIMIT = 60.0
"""Seconds for one command. A busy controller may take as long as that."""
HAS_ENDED = ("Invalid job id", "already completing or completed")
"""What scancel says about a job that is over."""
_UNCERTAIN = ("timed out", "no answer within", "zero bytes were transmitted", "reset by peer")
"""In what sbatch says if the controller may have its request nevertheless."""
FAILED, NOT_FOUND, TIMED_OUT = 1, 127, 124
MAX_TEXT = 16 << 10

_JOB = re.compile(r"([0-9]{1,10})(?:;([\w.-]*))?")
_OPTIONS = (
    *("SLURM_", "SRUN_", "SQUEUE_", "SCANCEL_"),
    *("SBATCH_ARRAY", "SBATCH_CLUSTERS", "SBATCH_EXPORT", "SBATCH_GPUS", "SBATCH_GRES"),
    "SBATCH_WAIT",
)
"""How variables begin that give options to Slurm's commands. Other variables of sbatch stay: they
are a user's defaults, such as an account."""
_NO_OPTIONS = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


class CommandResult:
    """How a command ended: ``text`` is its output, or with a ``status`` other than 0 its error.
    ``hint`` is the remedy if this program knows it."""

    def __init__(self, command: str, status: int, text: str, hint: str = "") -> None:
        self.command = command
        self.status = status
        self.text = text
        self.hint = hint

    @property
    def uncertain(self) -> bool:
        """Whether Slurm may do what the command asks, although it failed."""
        return self.status != 0 and any(words in self.text.lower() for words in _UNCERTAIN)


class BatchJob:
    """The job of a run, which ``sbatch`` submits. ``folder`` has the run's files."""

    def __init__(self, run: str, folder: bytes) -> None:
        self.run = run
        self.folder = folder
        self.number = ""
        """Empty until the job is submitted, or found."""
        self._is_saved()

    def submit(self, order: SubmitOrder) -> CommandResult:
        """Start the job, unless another program has done so. Sets `number`."""
        try:
            make_private(self.folder, order["trust_group"])
            with locked(self.folder) as lock:
                if self._is_saved():
                    return CommandResult("", 0, "")
                if unanswered := self.saved(UNANSWERED):
                    return CommandResult("sbatch", FAILED, unanswered)
                self.save(SCRIPT, raw(order["script"]))
                self.save(b"runtime.zip", binascii.a2b_base64(order["runtime"]))
                return self._start(order, lock)
        except OSError as error:
            return not_begun(error, self.folder)

    def _start(self, order: SubmitOrder, lock: int) -> CommandResult:
        """Submit the job's script. sbatch holds ``lock``, too: it goes on if this program is
        killed. Raises OSError."""
        output = re.sub(r"([\\%])", r"\\\1", shown(self.path(OUTPUT)))
        # Variables such as SBATCH_PARTITION come before the lines of a script.
        own = ["--parsable", "--job-name=" + self.run, "--output=" + output, "--error=" + output,
               "--open-mode=append"]  # fmt: skip
        script = shown(self.path(SCRIPT))
        variables = environment(order, own_variables())
        command = ["sbatch", *order["options"], *own, script]
        answer = _run(command, expand(order["workdir"]), variables, (lock,))
        # Enough to repeat it: the other options say only where this program reads.
        answer.command = " ".join(["sbatch", *order["options"], script])
        if answer.uncertain:
            with contextlib.suppress(OSError):  # as on a full disk
                self.save(UNANSWERED, answer.text[-500:].encode())
        if answer.status:
            return answer
        # A site's plugins may print more.
        jobs = [line for line in answer.text.split("\n") if self._is_job(line)]
        if not jobs:
            reason = "it printed no job number: " + answer.text
            return CommandResult(answer.command, FAILED, reason)
        with contextlib.suppress(OSError):  # as on a full disk: the job has its name, too
            self.save(JOB_FILE, jobs[-1].encode())
        return answer

    def find(self) -> CommandResult:
        """Set `number`, if the job was submitted. Waits for another program that submits it."""
        none = CommandResult("", 0, "")
        if not os.path.isdir(self.folder):
            return none
        with locked(self.folder):
            if self._is_saved() or not os.path.exists(self.path(SCRIPT)):
                return none
            # That program may have been killed between the submission and the file.
            answer = self._queued()
            self.number = "" if answer.status else answer.text
            return answer

    @property
    def may_come(self) -> bool:
        """Whether an earlier program may have submitted the job although Slurm does not show it."""
        if self.number:
            return False
        with contextlib.suppress(OSError):
            return time.time() - os.stat(self.path(SCRIPT)).st_mtime < MAY_COME
        return False

    def _is_saved(self) -> bool:
        """Set `number`, if a file has it."""
        return self._is_job(self.saved(JOB_FILE))

    def _is_job(self, printed: str) -> bool:
        """Set `number` from what ``sbatch`` printed, if that is a job. With SLURM_CLUSTERS, the job
        has a cluster: all later commands ask that one, also from a shell without the variable."""
        found = _JOB.fullmatch(printed)
        if found is None:
            return False
        self.number = found[1]
        if found[2]:
            os.environ["SLURM_CLUSTERS"] = found[2]
        return True

    def _queued(self) -> CommandResult:
        """The last job with the name of the run; an empty ``text`` if there is none."""
        answer = _squeue("--states=all", "--format=%i", "--name=" + self.run)
        if not answer.status:
            jobs = list(filter(_JOB.fullmatch, answer.text.split()))
            answer.text = jobs[-1] if jobs else ""
        return answer

    def describe(self) -> CommandResult:
        """What the controller says about the job; an empty ``text`` if nobody knows the job. The
        controller forgets it some minutes after its end."""
        answer = _run(["scontrol", "show", "job", "--oneliner", self.number])
        if answer.status and "Invalid job id" in answer.text:
            return CommandResult(answer.command, 0, self.saved_end())
        return answer

    def saved_end(self) -> str:
        """The state of a job whose script has ended, as the controller would write it; empty if the
        script has saved no status."""
        status = self.saved(STATUS)
        if not status.isdigit():
            return ""
        return "JobState=%s ExitCode=%s:0" % ("FAILED" if int(status) else "COMPLETED", status)

    def cancel(self, kill: bool) -> CommandResult:
        """End the job. ``kill``: without TERM first."""
        options = ["--signal=KILL", "--full"] if kill else []
        if kill:
            _run(["scancel", self.number])  # it may not have started
        answer = _run(["scancel", *options, self.number])
        if any(words in answer.text for words in HAS_ENDED):
            return CommandResult(answer.command, 0, "")
        return answer

    def fail(self, restart: bool) -> CommandResult:
        """Kill the processes of the job. Its script sees that they failed, and starts them again if
        it may. ``restart``: whether it may."""
        if not restart:
            try:
                self.save(LAST, b"")
            except OSError as error:
                return CommandResult("fail", FAILED, words(error))
        answer = _squeue("--steps", "--jobs=" + self.number, "--format=%i %j")
        names = re.compile(r"(\S+) %s(?:\.\d+)?\.dtrain_process" % re.escape(self.run))
        found = map(names.fullmatch, () if answer.status else answer.text.splitlines())
        steps = [step[1] for step in found if step]
        return _run(["scancel", "--signal=KILL", *steps]) if steps else answer

    def path(self, name: bytes) -> bytes:
        return os.path.join(self.folder, name)

    def save(self, name: bytes, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with closing_fd(os.open(self.path(name), flags, 0o600)) as fd:
            write_all(fd, data)

    def saved(self, name: bytes) -> str:
        return (read_regular(self.path(name), 512) or b"").decode("ascii", "replace").strip()


def environment(order: SubmitOrder, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job."""
    kept = {name: value for name, value in inherited.items() if name not in order["hidden"]}
    return dict(kept, **order["environment"])


def own_variables() -> dict[str, str]:
    """The variables of this program without those by which Slurm's commands take options. A shell
    of salloc has them, and users set them for the commands that they type."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _NO_OPTIONS or not name.startswith(_OPTIONS)
    }


@contextlib.contextmanager
def locked(folder: bytes) -> Iterator[int]:
    """Only one program at a time submits a run, on any login node."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with closing_fd(os.open(os.path.join(folder, b"lock"), flags, 0o600)) as fd:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd


def make_private(folder: bytes, trust_group: str | None) -> None:
    """Create the run's folder. No other user can change the script in it. Raises OSError."""
    trust = Trust(trust_group)
    nodes = os.path.dirname(folder)
    os.close(trust.open_folder(nodes, own=1, created=[], private=False)[0])
    os.close(trust.open_folder(folder, own=2, created=[])[0])


def not_begun(error: OSError, folder: bytes) -> CommandResult:
    """The answer if the run's folder cannot be used."""
    hint = error.hint("`cluster.run_dir`") if isinstance(error, UnsafeError) else ""
    return CommandResult("", FAILED, words(error, folder), hint)


def _squeue(*options: str) -> CommandResult:
    """Without ``--all``, it leaves out the jobs of hidden partitions."""
    return _run(["squeue", "--all", "--noheader", *options])


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
            env=own_variables() if environment is None else environment,
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        # sbatch says why it tries again.
        last = shown(error.stderr or b"").strip().rpartition("\n")[2]
        said = "no answer within %d s" % LIMIT
        return CommandResult(text, TIMED_OUT, "%s: %s" % (said, last) if last else said)
    except OSError as error:
        # A busy login node may refuse to start another process.
        missing = isinstance(error, FileNotFoundError) and error.filename == command[0]
        said = "%s: not found" % command[0] if missing else words(error)
        return CommandResult(text, NOT_FOUND if missing else FAILED, said)
    said = shown(done.stderr if done.returncode else done.stdout)
    return CommandResult(text, done.returncode, said.strip()[:MAX_TEXT])


def words(error: OSError, place: bytes = b"") -> str:
    """``place``: of an error that names no file, such as a full disk."""
    name = error.filename or place
    return "%s: %s" % (name if isinstance(name, str) else shown(name), error.strerror)

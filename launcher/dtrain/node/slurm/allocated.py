"""A job inside an existing allocation of the user."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess

from dtrain.node.agent.folder import expand
from dtrain.node.agent.processes import look
from dtrain.node.agent.wire import shown
from dtrain.node.agent.worker_files import read_regular
from dtrain.node.slurm.commands import (
    FAILED,
    MAX_TEXT,
    OUTPUT,
    SCRIPT,
    STATUS,
    BatchJob,
    CommandResult,
    environment,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.slurm.orders import SubmitOrder

PROCESS = b"process"
MAX_OUTPUT = 1 << 20
"""Bytes at the end of the script's output that are searched for restarts."""
_SESSION = """\
trap 'stopped=1; [ -z "$!" ] || kill -TERM $!' TERM
read -ra stat <"/proc/$$/stat"
echo "$4 $$ ${stat[21]}" >"$5.new" && mv "$5.new" "$5" || exit
eval "exec >/dev/null 2>&1 $6>&-"
bash "$1" >>"$2" 2>&1 &
[ -z "$stopped" ] || kill -TERM $!
wait $!
status=$?
while kill -0 $!; do
  wait $!
  status=$?
done
trap '' TERM
kill -TERM 0
echo $status >"$3.new"
mv "$3.new" "$3"
"""
"""Saves the identity of the session, and then closes its output and the lock. Runs a script, and
writes its exit status. Passes TERM on to the script alone. A script that ends before it handles
TERM leaves its sruns: they get TERM at its end."""

_ENDED = re.compile(r"\bJobState=(?:CANCELLED|TIMEOUT|DEADLINE|NODE_FAIL|PREEMPTED|OUT_OF_MEMORY)")
_RESTART = re.compile(rb"^dtrain: attempt \d+ ended; the job starts again$", re.MULTILINE)


class AllocationScript(BatchJob):
    """Its script runs on this machine, and its sruns are steps of the allocation.

    The script runs in a session of its own. The file ``process`` identifies the session, and
    ``status`` appears with the script's exit status.
    """

    def __init__(self, run: str, folder: bytes, allocation: str) -> None:
        self._allocation = allocation
        super().__init__(run, folder)

    @property
    def may_come(self) -> bool:
        return False  # `find` sees every script

    def _is_saved(self) -> bool:
        self.number = self._allocation if self._begun() else ""
        return self.number != ""

    def _begun(self) -> bool:
        return os.path.exists(self.path(PROCESS))

    def _queued(self) -> CommandResult:
        return CommandResult("", 0, "")  # Slurm does not know it

    def _start(self, order: SubmitOrder, lock: int) -> CommandResult:
        """Start the session. It holds ``lock`` until its identity is saved, even if this program is
        killed. Raises OSError."""
        paths = [shown(self.path(name)) for name in (SCRIPT, OUTPUT, STATUS, PROCESS)]
        paths.insert(3, os.uname().nodename)
        variables = environment(order, os.environ)
        variables["SLURM_RESTART_COUNT"] = "0"  # the run's attempts are not those of the allocation
        process = subprocess.Popen(
            ["bash", "-c", _SESSION, "dtrain", *paths, str(lock)],
            cwd=expand(order["workdir"]),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )
        assert process.stdout is not None
        with process.stdout as stdout:
            said = stdout.read()
        if not self._is_saved():
            process.wait()
            return CommandResult("bash", FAILED, shown(said).strip()[:MAX_TEXT])
        return CommandResult("bash", 0, self.number)

    def describe(self) -> CommandResult:
        answer = super().describe()
        text = self.saved_end()
        if answer.status:
            return answer
        if not text and self._begun() and self._here() and self._pid() is None:
            text = "JobState=CANCELLED"
        if text and not _ENDED.search(answer.text):
            answer.text = text + " " + answer.text  # the first value of a field counts
        if answer.text:
            output = read_regular(self.path(OUTPUT), MAX_OUTPUT, -MAX_OUTPUT) or b""
            answer.text = "Restarts=%d %s" % (len(_RESTART.findall(output)), answer.text)
        return answer

    def cancel(self, kill: bool) -> CommandResult:
        if not self._here():
            text = "the job runs on %s; run this command there" % self.saved(PROCESS).split(" ")[0]
            return CommandResult("kill", FAILED, text)
        pid = self._pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                # The script gives its processes time to finish. srun does not.
                (os.killpg if kill else os.kill)(pid, signal.SIGTERM)
        return CommandResult("kill", 0, "")

    def _identity(self, pid: int) -> str:
        proc = look(pid)
        return "%s %d %d" % (os.uname().nodename, pid, proc.start if proc else 0)

    def _here(self) -> bool:
        return self.saved(PROCESS).split(" ")[0] in ("", os.uname().nodename)

    def _pid(self) -> int | None:
        """The leader of the script's session, while it runs."""
        saved = self.saved(PROCESS)
        fields = saved.split(" ")
        if len(fields) != 3 or not fields[1].isdigit():
            return None
        pid = int(fields[1])
        proc = look(pid)
        return pid if proc and proc.alive and self._identity(pid) == saved else None

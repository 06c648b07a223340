"""Runs Slurm's own commands where the job is submitted: here, or on the login host over SSH."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from dtrain.diagnostics import PrepareError
from dtrain.engines.slurm.partitions import MACHINES, PARTITIONS, Partition, read
from dtrain.engines.slurm.submission import hint_for, login_host
from dtrain.quoting import words
from dtrain.records import dataclass
from dtrain.spec.model import Slurm
from dtrain.transport.contract import Connection, Transport

LIMIT = 60.0
"""Seconds for one command. A busy controller may take as long as that."""
MAX_OUTPUT = 64 << 20
NOT_FOUND = 127


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """How a command ended."""

    name: str
    status: int | None
    """None if the command gave no answer in time."""
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it says about its failure."""
        if self.status is None:
            return f"{self.name}: no answer within the time limit"
        if self.status == NOT_FOUND:
            return f"{self.name}: not found"
        lines = (self.err.strip() or self.out.strip())[-2000:].splitlines()
        said = "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))
        return said or f"{self.name} ended with status {self.status}"


_HELD = """\
for name in "${!SLURM_@}" "${!SRUN_@}"; do
  case $name in SLURM_CONF | SLURM_CLUSTERS | SLURM_JWT) ;; *) unset "$name" ;; esac
done
exec 3<&0
exec "${@:2}" < <(head -c "$1" <&3; exec >/dev/null 2>&1; cat <&3; kill $$) 3<&-
"""
"""Runs a command with the first bytes of the input, until it or the input ends. As in
`dtrain.node.slurm.commands`, no variable adds options."""


class LoginShell:
    """The login node of one job. Any thread may use it."""

    def __init__(self, host: str, connection: Connection) -> None:
        self.host = host
        self._connection = connection

    def run(
        self, command: Sequence[str], stdin: bytes = b"", limit: float = LIMIT
    ) -> CommandAnswer:
        """Run a command to its end. One that waits long for a controller ends with the connection,
        and so with this process. Raises ConnectError if the connection is lost."""
        held = words(["bash", "-c", _HELD, "dtrain", str(len(stdin)), *command])
        process = self._connection.start(str(held))
        late = threading.Event()

        def end() -> None:
            late.set()
            process.close()

        timer = threading.Timer(limit, end)
        timer.daemon = True
        timer.start()
        out = bytearray()
        try:
            process.write(stdin)
            while (data := process.read()) and len(out) <= MAX_OUTPUT:
                out += data
            status = None if late.is_set() else process.wait(limit)
        except TimeoutError:
            status = None
        finally:
            timer.cancel()
            process.close()
        return CommandAnswer(command[0], status, _text(bytes(out)), _text(process.stderr()))

    def partitions(self) -> tuple[Partition, ...]:
        """All partitions that the user may see. Raises NodeError."""
        answers = []
        for command in (PARTITIONS, MACHINES):
            answer = self.run(command)
            if answer.status != 0:
                raise PrepareError(
                    self.host,
                    "asking Slurm for its partitions",
                    answer.words,
                    hint=hint_for(answer.words, self.host),
                )
            answers.append(answer.out)
        return read(*answers)


@contextmanager
def opened(transport: Transport, slurm: Slurm) -> Iterator[LoginShell]:
    """A shell on the login host. Raises NodeError."""
    host = login_host(slurm)
    with closing(transport.connect(host)) as connection:
        yield LoginShell(host.name, connection)


def partitions(transport: Transport, slurm: Slurm) -> tuple[Partition, ...]:
    """The partitions of the cluster behind a login host. Raises NodeError."""
    with opened(transport, slurm) as shell:
        return shell.partitions()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")

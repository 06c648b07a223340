"""Connections to the program that runs Slurm's commands, on the login node or on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from dtrain.diagnostics import NodeError
from dtrain.engines.slurm.state import SlurmState, parse
from dtrain.engines.slurm.submission import job_order, login_host
from dtrain.messages import slurm as messages
from dtrain.messages.agent import Bye
from dtrain.messages.decode import answer_of
from dtrain.node import protocol
from dtrain.node.slurm.orders import FirstOrder
from dtrain.runs.record import Record
from dtrain.session.relays.relay import RelayChannel
from dtrain.spec.model import Slurm
from dtrain.sync import Patience, SyncResult, Tree, send
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, Transport

KEPT = 30 * 86400.0
"""Seconds for which the sent files stay: the login node does not see if a job uses them."""


class Login:
    """Where the commands of one run's engine run."""

    def __init__(self, transport: Transport, record: Record) -> None:
        plan = record.plan
        self._transport = transport
        self._record = record
        self._order = job_order(record)
        slurm = record.request.spec().cluster.slurm or Slurm()
        # An allocation's own machines have the commands, and its environment.
        self._host = login_host(replace(slurm, login=None) if record.request.allocation else slurm)
        self._python = "python3" if self.is_here else plan.agent_python(plan.hosts[0])
        self._connection: Connection | None = None
        """The last one that `opened` has made."""

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def answer(self) -> str:
        """What is waited for while nothing arrives."""
        return f"Slurm on {self.name} to answer"

    @property
    def is_here(self) -> bool:
        return self._host.transport == "local"

    @contextmanager
    def opened(self, order: FirstOrder) -> Iterator[RelayChannel]:
        """A new program with its first order. Raises NodeError."""
        with closing(self._transport.connect(self._host)) as connection:
            self._connection = connection
            label = self._record.run
            process = node_program.start(connection, "slurm", self._python, label=label)
            process.write(protocol.encode_command(order))
            yield RelayChannel(self.name, connection, process, self._python)

    def close(self) -> None:
        """End the connection and each attempt to connect, for good. Any thread may call it."""
        self._transport.close()
        if self._connection is not None:
            self._connection.close()

    def send(self, tree: Tree, workdir: str) -> SyncResult:
        """Send the files of the job to a folder that all machines share. Raises NodeError."""
        with closing(self._transport.connect(self._host)) as connection:
            return send(
                connection,
                self._host,
                tree,
                workdir,
                python=self._python,
                trust_group=self._record.plan.trust_group,
                patience=Patience(unused=KEPT),
            )

    def look(self) -> SlurmState | None:
        """The state of the job; None if Slurm does not know it. Raises NodeError."""
        job = self._record.job_id or self._record.request.allocation
        return self._ask({"op": "look", **self._order, "job": job})

    def end(self) -> SlurmState | None:
        """Kill the job. Returns its state, as `look`; it may not have ended yet. Raises
        NodeError."""
        return self._ask({"op": "end", **self._order, "job": self._record.job_id})

    def _ask(self, order: FirstOrder) -> SlurmState | None:
        state: SlurmState | None = None
        with self.opened(order) as channel:
            with answer_of(self.name, "asking for the job's state"):
                for body in channel.messages():
                    match messages.read_message(body):
                        case messages.JobDescribed(text) if text:
                            state = parse(text)
                        case messages.Trouble(command, text):
                            raise NodeError(self.name, command, text)
                        case messages.Submitted(None, True):
                            why = "Slurm may still accept a job whose submission it did not answer"
                            raise NodeError(self.name, "looking for the job", why)
                        case Bye():
                            return state
            raise channel.failure()

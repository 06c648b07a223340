"""Collects facts from all hosts at once, for `dtrain check` and before a launch.

Each host gets one SSH connection, on which `dtrain.node.facts` answers. There are two rounds: first
all hosts gather facts and start to listen, then each host dials all other hosts. Each round takes
as long as its slowest host. The launching machine's work per host does not grow with their number.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain import hostlist
from dtrain.checks import Evidence, HostFacts
from dtrain.checks.evidence import Facts
from dtrain.diagnostics import NodeError, UsageError
from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.messages import facts
from dtrain.node import programs
from dtrain.node.facts.orders import DialOrder
from dtrain.node.launchers import launcher_in, launcher_of
from dtrain.session.facts.conversation import END_SECONDS, Conversation
from dtrain.session.facts.everywhere import everywhere, in_thread
from dtrain.session.facts.gather_order import MARGIN, Depth, for_a_check, gather_order, peers
from dtrain.spec.model import Job
from dtrain.sync import local_folder
from dtrain.transport.contract import Connection, RemoteProcess
from dtrain.transport.questions import never
from dtrain.wording import login_waits

DIAL_SECONDS = 8.0
"""Limit for a connection between two hosts. TCP resends SYN after 1, 3 and 7 seconds."""
REHEARSAL_SECONDS = 240.0
BANDWIDTH_SECONDS = 600.0

_REHEARSALS = {"torch": "rehearsal", "tensorflow": "rehearsal_tensorflow"}


def refuse_impossible(job: Job, *, rendezvous: bool, bandwidth: bool) -> None:
    """Raise UsageError for a test that this framework does not have."""
    if bandwidth and job.framework != "torch":
        wrong = "`bandwidth` uses torch.distributed"
    elif rendezvous and job.framework not in _REHEARSALS:
        wrong = "`rendezvous` starts a process group of torch or servers of TensorFlow"
    else:
        return
    raise UsageError(
        f"{wrong}, but `job.framework` is {job.framework}",
        hint="check a copy of the file with `framework: torch`",
    )


class Preflight:
    """One check of all hosts of a plan. Any thread may call `close` to abort it."""

    def __init__(
        self,
        plan: LaunchPlan,
        reach: Callable[[HostPlan], Connection],
        *,
        base: Path,
        run: Callable[[str, Callable[[], None]], None] = lambda host, call: in_thread(call),
        stopped: Callable[[], bool] = never,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``reach`` returns a host's connection or raises NodeError. Relative paths on this machine
        start at ``base``. ``run`` starts a call for a host, given by name, in a thread. For
        ``stopped`` see `everywhere`. If the plan is that of a run, `release` is possible."""
        self._plan = plan
        self._reach = reach
        self._base = base
        self._run = run
        self._stopped = stopped
        self._notice = notice
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._closed = False
        self.conversations: dict[str, Conversation] = {}
        """The hosts whose program starts or runs."""
        self.unanswered = set(plan.host_names)
        """Hosts that have neither reported their facts nor failed yet."""

    def look(self, depth: Depth) -> Evidence:
        """Gather the facts of all hosts, at the given depth."""

        def gather(part: HostPlan) -> tuple[HostFacts, int | None]:
            try:
                return self._gather(part, depth)
            finally:
                with self._lock:
                    self.unanswered.discard(part.host.name)

        answers = everywhere(
            gather,
            self._plan.hosts,
            depth.gathering,
            lambda part, call: self._run(part.host.name, call),
            stopped=self._stopped,
            waiting=self._name_silent,
        )
        failures = tuple(answer for answer in answers if isinstance(answer, NodeError))
        found = [answer for answer in answers if not isinstance(answer, NodeError)]
        hosts = [host for host, _ in found]
        ports = {host.name: port for host, port in found}
        answered = {host.name: host for host in hosts}

        def others(host: HostFacts) -> list[HostFacts]:
            # Of all hosts, whether they answer or not: these are the names that it has looked up.
            chosen = peers(self._plan.host_names, host.part.node_rank, depth)
            return [answered[name] for name in chosen if name in answered]

        dialed = everywhere(
            lambda host: self._dial(host, others(host), ports),
            hosts,
            depth.dialing,
            lambda host, call: self._run(host.name, call),
            stopped=self._stopped,
        )
        failures += tuple(answer for answer in dialed if isinstance(answer, NodeError))
        script = self._to_send(self._plan.job.script)
        return Evidence(
            plan=self._plan,
            hosts=tuple(answer for answer in dialed if not isinstance(answer, NodeError)),
            failures=failures,
            script_in_source=None if script is None else script.is_file(),
            launcher=self._launcher(),
        )

    def _name_silent(self) -> None:
        """Name the hosts where login scripts still run."""
        with self._lock:
            silent = [name for name, one in self.conversations.items() if not one.begun]
            silent = [name for name in silent if name in self.unanswered]
        if silent:
            self._notice(f"still waiting for {hostlist.brief(silent)}; {login_waits(silent[0])}")

    def rehearse(self, evidence: Evidence) -> Evidence:
        """Start a real process group (for TensorFlow, its servers) on all hosts with the job's own
        interpreter, and end it. Does nothing unless all hosts have answered, and nothing for a
        job in containers."""
        program = _REHEARSALS[self._plan.job.framework]
        reports, failures = self._on_all_ranks(
            evidence, program, facts.REHEARSED, REHEARSAL_SECONDS
        )
        return replace(evidence, rehearsal=reports, failures=(*evidence.failures, *failures))

    def measure(self, evidence: Evidence, *, compute: bool = False) -> Evidence:
        """Measure the bandwidth inside and between all hosts with torch.distributed; with
        ``compute``, also the speed of each rank's device. Does nothing unless all hosts have
        answered."""
        reports, failures = self._on_all_ranks(
            evidence, "bandwidth", facts.MEASURED, BANDWIDTH_SECONDS, compute=compute
        )
        return replace(evidence, bandwidth=reports, failures=(*evidence.failures, *failures))

    def _on_all_ranks(
        self, evidence: Evidence, program: str, kind: Any, limit: float, *, compute: bool = False
    ) -> tuple[dict[str, tuple[Facts, ...]], tuple[NodeError, ...]]:
        """The results of all ranks of each host, of type ``kind``, and errors of lost hosts."""
        if len(evidence.hosts) < len(self._plan.hosts) or self._plan.job.container:
            return {}, ()
        ranks = [[process.index for process in part.processes] for part in self._plan.hosts]
        own = {
            "rounds": list(rounds([each[0] for each in ranks if each])),
            "hosts": ranks,
            "compute": compute,
        }
        answers = everywhere(
            lambda host: self._ranks(host, program, own, kind, limit),
            evidence.hosts,
            limit + MARGIN,
            stopped=self._stopped,
        )
        reports: dict[str, tuple[Facts, ...]] = {}
        failures: list[NodeError] = []
        for host, answer in zip(evidence.hosts, answers, strict=True):
            if isinstance(answer, NodeError):
                failures.append(answer)
            else:
                reports[host.name] = answer
        return reports, tuple(failures)

    def _ranks(
        self, host: HostFacts, program: str, own: Mapping[str, Any], kind: Any, limit: float
    ) -> tuple[Facts, ...]:
        """Run a program as every rank of a host. Raises NodeError."""
        part = host.part
        environment = for_a_check(part.environment)
        if host.interface is not None:
            environment |= dict.fromkeys(part.interface_variables, host.interface)
        processes = part.processes
        options = {
            "program": program,
            "options": own,
            "ranks": [dict(process.environment) for process in processes],
        }
        answer, reports = self.conversations[host.name].ask(
            {
                "op": "run",
                "workdir": part.workdir_from(self._base),
                "trust_group": self._plan.trust_group,
                "setup": list(self._plan.job.setup),
                "environment": environment,
                "python": part.python,
                "program": {"code": programs.bundled_text(program), "options": options},
                "limit": limit,
            },
            partial(facts.read_ran, kind=kind),
        )
        words = (answer.get("output") or answer.get("error") or "").strip().splitlines()
        lost = {"failed": "start", "error": words[-1] if words else f"no answer within {limit:g} s"}
        reports += (lost,) * (len(processes) - len(reports))
        return tuple(
            {"silent": (), **each, **_identity(process)}
            for process, each in zip(processes, reports, strict=False)
        )

    def release(self) -> dict[str, RemoteProcess]:
        """End the check. Returns the processes, by host, that are relays from now on."""
        found = {host: one.release() for host, one in self.conversations.items()}
        return {host: process for host, process in found.items() if process is not None}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            conversations = list(self.conversations.values())
        for conversation in conversations:
            conversation.end()
        until = time.monotonic() + END_SECONDS
        for conversation in conversations:
            conversation.close(max(0.0, until - time.monotonic()))

    def _gather(self, part: HostPlan, depth: Depth) -> tuple[HostFacts, int | None]:
        conversation = Conversation(part, self._reach(part), self._plan.run)
        with self._lock:
            self.conversations[part.host.name] = conversation
            if self._closed:
                conversation.end()
        pythons = [self._plan.agent_python(part)]
        if depth.thorough and self._plan.job.container is None:
            # A broken job interpreter becomes a finding. A launch reports it itself.
            pythons = list(dict.fromkeys([part.python, "python3"]))
        conversation.begin(pythons)
        offset, took = conversation.clock(depth.round_trip)
        setup = self._plan.job.setup if depth.thorough else ()
        request = gather_order(
            self._plan, part, depth, token=self._token, workdir=part.workdir_from(self._base)
        )
        answer = conversation.ask(
            request, partial(facts.read_gathered, ports=request["ports"], setup=setup)
        )
        host = HostFacts(
            part,
            answer["facts"],
            latency=took,
            clock_offset=offset,
            clock_error=took / 2,
        )
        port = answer["listening"].get("port")
        return host, port if isinstance(port, int) else None

    def _dial(
        self, host: HostFacts, others: Sequence[HostFacts], ports: Mapping[str, int | None]
    ) -> HostFacts:
        """``host`` with the results of dialing ``others``. Each host starts with another one, so
        that not all hosts dial the same host at once."""
        targets = [target for peer in others for target in _targets(host, peer, ports[peer.name])]
        order: DialOrder = {
            "op": "dial",
            "targets": targets,
            "token": self._token,
            "limit": DIAL_SECONDS,
        }
        dialed = self.conversations[host.name].ask(
            order, partial(facts.read_dialed, targets=targets)
        )
        return replace(host, dialed=dialed)

    def _to_send(self, file: str | None) -> Path | None:
        """Where the folder of ``job.sync`` must have a file; None if the hosts have it."""
        sync = self._plan.job.sync
        if sync is None or file is None or file.startswith("/"):
            return None
        return local_folder(sync.source, self._base) / file

    def _launcher(self) -> str | None:
        """As `Evidence.launcher`."""
        if found := launcher_in("\n".join(self._plan.shell_texts).encode()):
            return found
        script = self._to_send(self._plan.shell_script)
        return None if script is None else launcher_of(str(script))


def _targets(host: HostFacts, peer: HostFacts, port: int | None) -> list[facts.DialTarget]:
    """The targets that ``host`` must dial at ``peer``: its address, its chosen interface, and the
    job's ports."""
    address = peer.part.host.address
    targets: list[facts.DialTarget] = []
    if port is not None:
        targets.append((peer.name, "address", address, port, None))
        theirs = peer.interface_address
        if peer.chosen_interface is not None and theirs is not None and theirs != address:
            ours = host.interface_address if host.chosen_interface is not None else None
            same_family = ours is not None and (":" in ours) == (":" in theirs)
            targets.append((peer.name, "interface", theirs, port, ours if same_family else None))
    for number, found in peer.fact("ports").items():
        if found["free"]:
            targets.append((peer.name, "port", address, int(number), None))
    return targets


def _identity(process: Process) -> dict[str, Any]:
    """The rank or task that identifies a process in its results."""
    return {"rank": process.index, "task": (process.role, process.index)}


def rounds(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds without repeated players (the circle method)."""
    circle: list[int | None] = [*players]
    if len(circle) % 2:
        circle.append(None)
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle.insert(1, circle.pop())

"""The connection to one host of an attempt.

Each link has a thread while it connects, runs the preflight checks, syncs files and starts the
agent. From then on the connection's own thread passes on the relay's messages until `bye`, so that
a running host has one thread. Threads that all links share send the controller's commands and a
ping every 5 s: a node that receives none assumes that the launcher is gone, and a relay that
answers none is replaced. Links make no decisions: `dtrain.engines.ssh.host_state` does, from what
the controller requests, the relay sends and the link observes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from dtrain.diagnostics import AuthError, ConnectError, NodeError
from dtrain.engines.ssh import host_events, host_state, problems
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.guarded import fault, run_guarded
from dtrain.engines.ssh.host_events import Post
from dtrain.engines.ssh.host_state import HostPhase, LinkState
from dtrain.engines.ssh.inbox import Inbox, Reported
from dtrain.engines.ssh.outage import Outage
from dtrain.engines.ssh.readiness import check_ready, waits
from dtrain.engines.ssh.relay_connection import RelayConnection
from dtrain.engines.ssh.requests import launch_request
from dtrain.engines.ssh.worker_reports import WorkerReports
from dtrain.launchplan.plan import HostPlan
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from dtrain.node import protocol
from dtrain.node.agent.commands import Command
from dtrain.runs import events
from dtrain.runs.shown_state import ShownState
from dtrain.session.relays.liveness import PingLimit
from dtrain.session.relays.relay import CommandWriter, RelayChannel, SilentRelayError
from dtrain.session.watching.evidence import HostEvidence
from dtrain.sync import SyncResult, send
from dtrain.transport.contract import Connection
from dtrain.transport.retry import spread


class Link:
    """The connection to one host. Methods may be called from any thread and return quickly."""

    def __init__(self, context: AttemptContext, part: HostPlan) -> None:
        self.host = part.host.name
        self.synced: SyncResult | None = None
        self._context = context
        self._part = part
        self._lock = threading.Lock()
        self.state = LinkState(self.host, movable_port=context.movable_port)
        self._timeout = context.plan.job.restart.node_timeout
        self._outage = Outage(context.contact)
        self.overdue: NodeError | None = None
        """Why the host is unreachable for too long, if the launcher reaches no other host."""
        self._closed = threading.Event()
        self.evidence = HostEvidence(self.host, part.host.gpus)
        self.reports = WorkerReports(context, part, lambda: self._connection.current)
        self._inbox = Inbox(context, part, self.evidence, self.reports, self._outage, self.step)
        self._commands = CommandWriter[Command](self._patience, self._fail)
        self._connection = RelayConnection(context.transport, context.plan, part, self._commands)
        self._all_received = threading.Event()
        """Set once the link reads nothing any more."""

    # Requests of the attempt --------------------------------------------------------------------

    def launch(self) -> None:
        """Prepare the host."""
        self._run(self._open)

    def attach(self, offsets: Mapping[str, int], reported: Reported) -> None:
        """Follow a host whose workers run already, see `Attempt.attach`."""
        self.state = host_state.attached(self.host)
        self._inbox.resume(offsets, reported)
        self._show(host_events.Show(ShownState.ATTACHING))
        self._outage.begin(time.monotonic())  # at once: nothing reaches the host before it ends
        self._commands.start()
        self._run(lambda: self._follow(self._reconnect(at_once=True)))

    def request_stacks(self, *, abort: bool, ras: bool) -> None:
        """See `WatchedHost.request_stacks`."""
        self.evidence.expect_stacks()
        self._commands.send({"op": "stacks", "abort": abort, "ras": ras})

    def close(self) -> None:
        """Send no commands beyond those already queued, and open no new connection."""
        self.step(host_events.Close())
        self._closed.set()
        self.reports.close()
        self._commands.finish()

    def disconnect(self, timeout: float) -> None:
        """Close the connection of a closed link once its commands are sent, or after ``timeout``
        seconds."""
        self._connection.disconnect(timeout)

    # State for the attempt ----------------------------------------------------------------------

    @property
    def reported_end(self) -> bool:
        """Whether it is known how the host's part ended."""
        return self.state.reported_end

    @property
    def reachable(self) -> bool:
        """Whether the connection works, as far as is known."""
        return self._outage.reachable and not self._commands.quiet

    @property
    def is_silent(self) -> bool:
        """Whether dtrain has logged in to the host, and no relay has answered there yet."""
        relay = self._commands.relay
        logged_in = self.state.shown in (ShownState.CHECKING, ShownState.PREPARING)
        remote = self._part.host.transport == "ssh"
        return remote and logged_in and (relay is None or relay.pid is None)

    def drained(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds. Returns whether everything from the host has arrived."""
        if self._commands.relay is None and not self.state.started:
            return True
        return self._all_received.wait(timeout)

    # Running the state machine ------------------------------------------------------------------

    def step(self, event: host_events.LinkEvent) -> HostPhase:
        """Pass ``event`` to the state machine and run its actions. Returns the new phase."""
        with self._lock:
            self.state, actions = host_state.step(self.state, event)
            phase = self.state.phase
            for action in actions:
                match action:
                    case host_events.Send(command):
                        self._commands.send(command)
                    case host_events.Show():
                        self._show(action)
                    case Post():
                        self._context.posts.put(action)
                    case host_events.Disconnect():
                        self._connection.close()
        return phase

    def _show(self, now: host_events.Show) -> None:
        self._context.recorder.record(events.HostState(self.host, now.state, now.detail))

    def _patience(self) -> int | None:
        """How many pings the relay may leave unanswered now; None before the start."""
        if not self.state.started:
            return None
        return PingLimit.STOPPING if self.state.stopping else PingLimit.NORMAL

    def _run(self, work: Callable[[], bool]) -> None:
        """Run ``work``, which returns whether more is to be received, in a thread of its own."""

        def receive() -> None:
            if not work():
                self._all_received.set()

        def fail(error: Exception) -> None:
            self._fail(error)
            self._all_received.set()

        run_guarded(f"{self.host} reader", receive, fail)

    def _fail(self, bug: Exception) -> None:
        """End the run, because a thread of this link raised ``bug`` or could not start."""
        self.step(host_events.LinkFailed(fault(bug, self._context.folder.path)))

    # Connecting ---------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Launch. Returns whether the relay follows the host."""
        try:
            relay = self._launch()
        except NodeError as error:
            self.step(host_events.Unreachable(error))
            if self._context.inspection is not None:
                self._context.inspection.drop(self.host)
            return False
        return self._follow(relay)

    def _launch(self) -> RelayChannel | None:
        """Start the agent and send its request. None if the launch was aborted.

        Raises NodeError.
        """
        context, part = self._context, self._part
        self.step(host_events.Connecting(ShownState.CONNECTING))
        connection = self._connect()
        if connection is None:
            return None
        if context.inspection is not None:
            self.step(host_events.Connecting(ShownState.CHECKING))
            if not context.inspection.check_host(self.host, connection):
                wrong = [one.seen for one in context.inspection.errors if self.host in one.hosts]
                self.step(host_events.CheckFailed(wrong[0] if wrong else ""))
                return None
        workdir = part.workdir_from(context.base)
        if context.tree is not None:
            self.step(host_events.Connecting(ShownState.SYNCING))
            self.synced = send(
                connection,
                part.host,
                context.tree,
                workdir,
                python=context.plan.agent_python(part),
                trust_group=context.plan.trust_group,
            )
            for notice in self.synced.notices:
                context.recorder.notice(f"{self.host}: {notice}")
            workdir = self.synced.tree_path
        if self.step(host_events.Requested()) is not HostPhase.PREPARING:
            return None
        request = launch_request(context.plan, part, workdir=workdir, secrets=context.secrets)
        relays = {} if context.inspection is None else context.inspection.relays
        relay = self._connection.start(connection, request, relays.get(self.host))
        self._commands.start()
        return relay

    def _connect(self) -> Connection | None:
        """Connect for a launch. A host that has run the job may be restarting: it is waited for, if
        no spare can replace it. None if the launch was aborted. Raises NodeError."""
        context, outage = self._context, Outage()
        limit = self._timeout if self.host in context.proven_hosts else 0.0
        outage.begin(time.monotonic())
        while True:
            outage.attempt(time.monotonic())
            try:
                connection = self._connection.connect(self._goes_on)
                if limit and connection is not None:
                    check_ready(connection, context.plan, self._part, context.base)
                return connection
            except (ConnectError, AuthError) as error:
                notice, delay = waits(error, limit), outage.delays.next(error)
                over = outage.attempted >= limit or context.spares.claim()
                if over or not notice or not self._goes_on():
                    raise
            context.recorder.notice_once(notice)
            self._closed.wait(spread(delay))
            if not self._goes_on():
                return None

    def _goes_on(self) -> bool:
        """Whether the link still follows the host, or wants to."""
        return self.state.phase not in (HostPhase.OVER, HostPhase.CLOSED)

    def _reconnect(
        self, problem: NodeError | None = None, *, at_once: bool = False
    ) -> RelayChannel | None:
        """Connect a new relay to the running job. None if the host is lost or the link closed.
        ``problem``: why the last relay did not follow the job."""
        self._outage.begin(time.monotonic())
        lost = self._would_be_lost()
        while not self._closed.is_set() and not lost:
            if not at_once:
                self._closed.wait(spread(self._outage.delays.next(problem)))
            self._outage.attempt(time.monotonic())
            lost = self._would_be_lost()
            try:
                relay = self._connection.attach(
                    self._answered, offsets=self._inbox.output.offsets, outputs=True
                )
                self.overdue = None
                return relay
            except NodeError as error:
                problem = error
                if error.shows_contact:
                    self._answered()
                if self._outage.attempted < self._timeout:
                    self.overdue = None
                elif not self._would_be_lost():
                    self.overdue = error
                self._show_refusal(error)
                if at_once:
                    self.step(host_events.Unreachable(error))
                    if self._inbox.end_is_known:
                        break
                at_once = False
        self._inbox.recall()
        problem = problem or problems.cut_off(self.host, self._timeout)
        self.step(host_events.TimedOut(problem))
        return None

    def _answered(self) -> bool:
        """The host has answered a new connection. Returns as `_goes_on`."""
        self._context.contact.made(time.monotonic(), self._timeout)
        return self._goes_on()

    def _would_be_lost(self) -> bool:
        """Whether the host is lost if the last attempt to connect has failed."""
        decided = self.state.phase is not HostPhase.RUNNING
        return self._outage.is_over(self._timeout, decided=decided)

    def _show_refusal(self, error: NodeError) -> None:
        """Name a problem that a new connection may not solve, such as another host key."""
        if not isinstance(error, ConnectError):
            self._context.recorder.notice_once(f"{error.message}; trying again", kind=error.reason)

    # Following ----------------------------------------------------------------------------------

    def _follow(self, relay: RelayChannel | None) -> bool:
        """Process the relay's messages until it ends, or until the host's part is over. Returns
        whether there is a relay."""
        if relay is None:
            return False
        self._inbox.begin_relay()

        def take(frame: protocol.Message | protocol.Data) -> bool:
            now = time.monotonic()
            self._outage.answered(now)
            self._context.contact.made(now, self._timeout)
            self._inbox.take(frame, relay, self.state)
            return self._goes_on()

        def end(problem: Exception | None) -> None:
            if problem is None and not self._goes_on():
                self._all_received.set()  # a thread for each host would end as soon as it starts
            else:
                self._run(lambda: self._ended(relay, problem))

        relay.follow(take, end)
        return True

    def _ended(self, relay: RelayChannel, problem: Exception | None) -> bool:
        """React to the end of a relay. Returns whether a new one follows the host."""
        if isinstance(problem, ConnectError):
            if isinstance(problem, SilentRelayError) and not self._closed.is_set():
                self._context.recorder.notice(f"{self.host}: {problem.reason}; starting a new one")
            self.step(host_events.Unreachable(problem))
        elif isinstance(problem, ProtocolError):
            self.step(host_events.Malformed(problem))
        elif problem is not None:
            raise problem
        elif self.state.phase is HostPhase.ABORTING:
            self.step(messages.Bye())
        elif self._goes_on():
            failure = relay.failure()
            self.step(host_events.Unreachable(failure))
            if self.state.started and not relay.has_begun:  # the login has no shell any more
                self._show_refusal(failure)
                return self._follow(self._reconnect(failure))
        return self.state.started and self._follow(self._reconnect())

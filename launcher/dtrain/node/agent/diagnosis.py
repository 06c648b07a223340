"""Collects stacks, collectives and kernel log lines of a run, and appends them as events."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from dtrain.node.agent.flight_recorder import DUMP_LIMIT, FlightRecorders
from dtrain.node.agent.kernel_log import KernelLog
from dtrain.node.agent.nccl_ras import query
from dtrain.node.agent.processes import Proc
from dtrain.node.agent.stacks import abort_all, spy
from dtrain.node.agent.sweep import HELPERS, start_helper
from dtrain.node.agent.wire import raw, shown
from dtrain.node.files import listed
from dtrain.node.revision import revision

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Protocol

    from dtrain.node.agent.wire import Json

    class EventLog(Protocol):
        def append(self, kind: str, **body: Any) -> None: ...


EVIDENCE_LIMIT = 5.0
"""Seconds that the end of a run waits for evidence of its cause."""
REVISION_LIMIT = 1.0
"""Seconds that it waits for Git: the job may be over before Git has compared all files."""


class Diagnosis:
    """Works in threads of its own, so that the supervisor never waits for evidence before the end
    of the run."""

    def __init__(
        self, events: EventLog, flights: FlightRecorders, ras_address: tuple[str, int] | None
    ) -> None:
        self._events, self._flights, self._ras_address = events, flights, ras_address
        self._kernel_log = KernelLog()
        self._thread: threading.Thread | None = None
        self._revision: threading.Thread | None = None
        self._git: subprocess.Popen[bytes] | None = None
        self._evidence_wanted = False

    def collect_stacks(self, processes: list[tuple[Json, Proc]], abort: bool, ras: bool) -> None:
        """Report the stacks of ``processes``, each with its identity, in the background. With
        ``ras``, report what NCCL knows of the whole job, too."""
        arguments = (processes, abort, ras)
        thread = threading.Thread(target=self._report_stacks, args=arguments, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads
            self._events.append("stacks_done")

    def collect_revision(self, workdir: bytes, code: str | None) -> None:
        """Report the Git commit of the folder ``code``, if there is one, in the background."""
        if code is None:
            return
        folder = os.path.join(workdir, os.path.expanduser(raw(code)))
        thread = threading.Thread(target=self._report_revision, args=(folder,), daemon=True)
        with contextlib.suppress(RuntimeError):  # too many threads
            thread.start()
            self._revision = thread

    def want_evidence(self) -> None:
        """Have the next `poll` collect evidence: a process has failed, or the run stops."""
        self._evidence_wanted = True

    def poll(self) -> None:
        """Start collecting evidence in the background if it is wanted."""
        if self._evidence_wanted and not self._is_collecting():
            thread = threading.Thread(target=self._report_evidence, daemon=True)
            with contextlib.suppress(RuntimeError):  # too many threads: try again later
                thread.start()
                self._thread, self._evidence_wanted = thread, False

    def finish(self) -> None:
        """Wait up to `EVIDENCE_LIMIT` seconds until all evidence is reported."""
        deadline = time.monotonic() + EVIDENCE_LIMIT
        if self._revision is not None:
            self._revision.join(REVISION_LIMIT)
            if self._git is not None and self._revision.is_alive() and self._git.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._git.pid, signal.SIGKILL)
        while True:
            if self._thread is not None:
                self._thread.join(max(0.0, deadline - time.monotonic()))
            if not self._evidence_wanted or self._is_collecting():
                return
            self.poll()
            if self._evidence_wanted:  # too many threads
                return

    def _is_collecting(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _report_revision(self, folder: bytes) -> None:
        def start(argv: list[bytes]) -> subprocess.Popen[bytes]:
            self._git = start_helper(argv)
            return self._git

        found = revision(folder, start)
        if self._git is not None:
            HELPERS.discard(self._git.pid)
        if found is not None:
            self._events.append("code", revision=found)

    def _report_stacks(self, processes: list[tuple[Json, Proc]], abort: bool, ras: bool) -> None:
        """Report what py-spy and torch's flight recorder show. With ``abort``, processes that
        py-spy cannot read get SIGABRT: Python's fault handler writes their stacks to stderr."""
        deadline = time.monotonic() + DUMP_LIMIT
        ranks = {identity["rank"] for identity, _ in processes}
        pending = {rank for rank in ranks if self._flights.request_dump(rank)}
        if ras and self._ras_address is not None:
            text = query(self._ras_address, [proc.pid for _, proc in processes])
            if text:
                self._events.append("ras", text=text)
        stacks, problems = spy([proc.pid for _, proc in processes])
        for identity, proc in processes:
            text, problem = stacks.get(proc.pid, ""), problems.get(proc.pid, "")
            self._events.append("stack", **identity, text=text, problem=problem)
        while pending:
            pending -= self._report_collectives()
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if abort:
            abort_all([proc for _, proc in processes if proc.pid not in stacks])
        self._events.append("stacks_done")

    def _report_collectives(self) -> set[int]:
        """Report the flight recorder dumps that are new. Returns their ranks."""
        fresh = self._flights.new_dumps()
        for rank, groups in fresh:
            self._events.append("collectives", rank=rank, groups=groups)
        return {rank for rank, _ in fresh}

    def _report_evidence(self) -> None:
        """Report new kernel log lines and flight recorder dumps. May take seconds."""
        lines = self._kernel_log.read()
        if lines:
            # In the order in which nvidia-smi numbers them.
            gpus = sorted(map(shown, listed(b"/proc/driver/nvidia/gpus")))
            self._events.append("kernel", lines=lines, gpus=gpus)
        self._report_collectives()

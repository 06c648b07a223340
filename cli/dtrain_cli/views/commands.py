"""The output of a command on many hosts, for users and programs."""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from dtrain.diagnostics import ExitCode
from dtrain.failures.alike import common_hint, common_text, of_one_kind
from dtrain.framing import LIMIT, LineFramer, clean, clean_all, prefixed, split
from dtrain.hostlist import brief, in_order
from dtrain.session.relays.commands import Outcome, Receiver
from dtrain.wording import counted, login_waits
from dtrain_cli.views import names
from dtrain_cli.views.folding import LineFolder
from dtrain_cli.views.outlet import Outlet

SCHEMA = 1
WINDOW = 1.0
"""Seconds that a line waits for the same line from other hosts."""
PATIENCE = 5.0
"""Seconds that the first line waits until every host has written or ended: some connect late."""
MOST_WAITING = 4 << 20
"""Characters that may wait; then all lines are printed."""


class CommandView(Receiver):
    """Splits the bytes of all hosts into lines."""

    limit: int
    """Characters of a line that are kept."""

    def __init__(self) -> None:
        self._framers: dict[tuple[str, str], LineFramer] = {}

    def output(self, host: str, stream: str, data: bytes) -> None:
        framer = self._framers.get((host, stream))
        if framer is None:
            framer = self._framers[host, stream] = LineFramer(limit=self.limit)
        if text := framer.feed(data):
            self.lines(host, stream, text)

    def ended(self, outcome: Outcome) -> None:
        for stream in ("stdout", "stderr"):
            framer = self._framers.pop((outcome.host, stream), None)
            if framer is not None and (rest := framer.flush()):
                self.lines(outcome.host, stream, rest)

    def waiting(self, hosts: Sequence[str]) -> None:
        self.notice(f"still waiting for {brief(hosts)}; {login_waits(hosts[0])}")

    @abstractmethod
    def lines(self, host: str, stream: str, text: str) -> None:
        """Whole lines, each with its newline."""

    @abstractmethod
    def notice(self, text: str) -> None: ...

    @abstractmethod
    def finished(self, outcomes: Sequence[Outcome], code: int) -> None: ...


class CommandLines(CommandView):
    """Prints stdout on stdout and stderr on stderr, with ``[host]`` before each line, and on stderr
    how the command failed. A line that several hosts write is printed once."""

    limit = LIMIT

    def __init__(
        self,
        out: Outlet,
        err: Outlet,
        *,
        fold: bool,
        color: tuple[bool, bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``color``: whether to color stdout and stderr."""
        super().__init__()
        self.clock = clock
        self._width = 0
        self._outlets = {"stdout": out, "stderr": err}
        self._color = dict(zip(("stdout", "stderr"), color, strict=True))
        self._fold = fold
        self._folder: LineFolder[str] = LineFolder(WINDOW if fold else 0.0)
        self._waiting = 0
        self._silent: set[str] = set()
        self._hold_until: float | None = None

    def started(self, hosts: Sequence[str]) -> None:
        self._width = max(map(len, hosts), default=0)
        self._silent = set(hosts)

    def lines(self, host: str, stream: str, text: str) -> None:
        self._heard(host)
        self._folder.add(self.clock(), host, stream, text)
        self._waiting += len(text)
        if self._waiting > MOST_WAITING:
            self._take(math.inf)
        self.idle()

    def _heard(self, host: str) -> None:
        now = self.clock()
        if self._hold_until is None:
            self._hold_until = now + PATIENCE
        if host in self._silent:
            self._silent.remove(host)
            if not self._silent:
                self._hold_until = min(self._hold_until, now + WINDOW)

    def idle(self) -> None:
        """Print the lines that have waited long enough."""
        now = self.clock()
        if self._fold and self._hold_until is not None and now < self._hold_until:
            return
        self._take(now)

    def notice(self, text: str) -> None:
        self._outlets["stderr"].write(f"dtrain: {clean(text)}\n")

    def ended(self, outcome: Outcome) -> None:
        """Note that the host writes no more. `finished` prints how it ended."""
        super().ended(outcome)
        self._heard(outcome.host)

    def finished(self, outcomes: Sequence[Outcome], code: int) -> None:
        self._take(math.inf)
        groups: dict[tuple[str, str], list[str]] = {}
        interrupted = code == ExitCode.INTERRUPTED
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        kinds = {id(error): same for same in of_one_kind(errors, []) for error in same}
        for outcome in outcomes:
            if outcome.error is not None:
                same = kinds[id(outcome.error)]
                said: tuple[str, str] | None = (common_text(same), common_hint(same))
            else:
                # After Ctrl-C, name only the hosts that did not confirm the end.
                said = None if interrupted else _failure(outcome)
            if said:
                groups.setdefault(said, []).append(outcome.host)
        for (failure, hint), hosts in groups.items():
            text = f"error: {names.hosts(hosts)}: {clean(failure)}\n"
            if hint:
                text += f"hint: {clean(hint)}\n"
            self._outlets["stderr"].write(text)
        if interrupted:
            stopped = sum(outcome.error is None for outcome in outcomes)
            self.notice(f"interrupted; the command has ended on {counted(stopped, 'host')}")
        elif groups and len(outcomes) > 1:
            failed = sum(map(len, groups.values()))
            total = counted(len(outcomes), "host")
            self.notice(f"{failed} of {total} failed")

    def _take(self, now: float) -> None:
        """Print the lines that have waited until ``now``."""
        for folded in self._folder.take(now):
            self._print(folded.kind, folded.sources, folded.text)
        if self._folder.due is None:
            self._waiting = 0

    def _print(self, stream: str, sources: list[str], text: str) -> None:
        head = f"[{names.hosts(in_order(sources)):<{self._width}}]"
        color = self._color[stream]
        if color:
            head = names.paint(head, names.color_of(sources[0], ""))
        self._outlets[stream].write(prefixed(clean_all(text, color), f"{head} "))


class CommandJson(CommandView):
    """JSON Lines: ``started``, ``line``, ``notice``, ``ended`` for each host, and ``finished``."""

    limit = 1 << 20

    def __init__(self, out: Outlet) -> None:
        super().__init__()
        self._out = out

    def started(self, hosts: Sequence[str]) -> None:
        self._out.write(_event("started", hosts=[*hosts]))

    def lines(self, host: str, stream: str, text: str) -> None:
        self._out.write(
            "".join(_event("line", host=host, stream=stream, text=x) for x in split(text))
        )

    def notice(self, text: str) -> None:
        self._out.write(_event("notice", text=text))

    def ended(self, outcome: Outcome) -> None:
        super().ended(outcome)
        failure, hint = _failure(outcome) or ("", "")
        self._out.write(
            _event(
                "ended",
                host=outcome.host,
                code=outcome.code,
                signal=outcome.signal,
                late=outcome.late,
                error=failure,
                hint=hint,
            )
        )

    def finished(self, outcomes: Sequence[Outcome], code: int) -> None:
        failed = [one.host for one in outcomes if one.exit_code]
        self._out.write(_event("finished", exit_code=code, failed=failed))


def _failure(outcome: Outcome) -> tuple[str, str] | None:
    """What went wrong on a host, and the remedy."""
    if outcome.error is not None:
        return f"{outcome.error.attempted}: {outcome.error.reason}", outcome.error.hint
    if outcome.late:
        return "stopped at the time limit", ""
    if outcome.reason:
        return outcome.reason, ""
    if outcome.signal is not None:
        return f"killed by {outcome.signal}", ""
    return (f"exited with status {outcome.code}", "") if outcome.code else None


def _event(kind: str, **fields: Any) -> str:
    return json.dumps({"schema": SCHEMA, "event": kind, **fields}) + "\n"

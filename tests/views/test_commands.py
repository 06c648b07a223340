"""The output of `dtrain exec`: folded lines, failures, JSON."""

from __future__ import annotations

from dtrain.diagnostics import ConnectError
from dtrain.session.relays.commands import Outcome
from dtrain_cli.views.commands import MOST_WAITING, PATIENCE, WINDOW, CommandLines
from dtrain_cli.views.outlet import Outlet
from support.runs import Capture


class Shown:
    """A view with a clock of its own."""

    def __init__(self, *hosts: str, fold: bool = True) -> None:
        self.now = 100.0
        self.out, self.err = Capture(), Capture()
        outlets = [Outlet(one.stream) for one in (self.out, self.err)]
        self.view = CommandLines(*outlets, fold=fold, color=(False, False), clock=lambda: self.now)
        self.view.started(hosts)

    def say(self, host: str, text: str) -> None:
        self.view.output(host, "stdout", text.encode())

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.view.idle()

    def finish(self, *outcomes: Outcome, code: int = 0) -> tuple[str, str]:
        for outcome in outcomes:
            self.view.ended(outcome)
        self.view.finished(outcomes, code)
        return self.out.text(), self.err.text()


def test_equal_lines_of_hosts_that_answer_late_are_one_line() -> None:
    shown = Shown("a1", "a2", "a3")
    shown.say("a1", "same\nmine\n")
    shown.later(PATIENCE - 1)
    shown.say("a2", "same\n")
    shown.say("a3", "same\nno end")
    out, _ = shown.finish(*(Outcome(host, 0) for host in ("a1", "a2", "a3")))
    assert out == "[a[1-3]] same\n[a1] mine\n[a3] no end\n"


def test_no_line_waits_for_a_silent_host_for_long() -> None:
    shown = Shown("a1", "a2")
    shown.say("a1", "first\n")
    shown.later(PATIENCE)
    shown.say("a1", "second\n")
    shown.later(WINDOW)
    shown.say("a2", "second\n")
    out, _ = shown.finish(Outcome("a1", 0), Outcome("a2", 0))
    assert out == "[a1] first\n[a1] second\n[a2] second\n"


def test_much_output_does_not_wait_in_memory() -> None:
    shown = Shown("a1", "a2")
    shown.say("a1", ("x" * 999 + "\n") * (MOST_WAITING // 999 + 1))
    shown.say("a2", "x" * 999 + "\n")
    out, _ = shown.finish(Outcome("a1", 0), Outcome("a2", 0))
    assert out.count("[a1] ") == MOST_WAITING // 999 + 1
    assert "[a[1-2]]" not in out


def test_without_folding_each_line_is_printed_at_once() -> None:
    shown = Shown("a1", "a2", fold=False)
    shown.say("a1", "same\n")
    shown.say("a2", "same\n")
    assert shown.finish()[0] == "[a1] same\n[a2] same\n"


def test_failures_are_one_line_for_each_reason() -> None:
    shown = Shown("a1", "a2", "a3", "a4")
    lost = ConnectError("a4", "connecting to a4", "timed out", hint="is it on?")
    _, err = shown.finish(
        Outcome("a1", 0), Outcome("a2", 4), Outcome("a3", 4), Outcome("a4", error=lost)
    )
    assert err == (
        "error: a[2-3]: exited with status 4\n"
        "error: a4: connecting to a4: timed out\n"
        "hint: is it on?\n"
        "dtrain: 3 of 4 hosts failed\n"
    )


def test_after_an_interrupt_only_hosts_without_an_answer_are_errors() -> None:
    shown = Shown("a1", "a2")
    lost = ConnectError("a2", "running a command", "interrupted before it answered")
    _, err = shown.finish(Outcome("a1", signal="SIGTERM"), Outcome("a2", error=lost), code=130)
    assert err == (
        "error: a2: running a command: interrupted before it answered\n"
        "dtrain: interrupted; the command has ended on 1 host\n"
    )


def test_all_hosts_are_named_where_a_command_printed_or_failed() -> None:
    hosts = [f"ip-10-{number}-253-{9 * number}.us-west-2.compute.internal" for number in range(9)]
    shown = Shown(*hosts)
    for host in hosts:
        shown.say(host, "same\n")
    out, err = shown.finish(*(Outcome(host, 1) for host in hosts), code=1)
    assert out == f"[{','.join(hosts)}] same\n"
    assert err.startswith(f"error: {','.join(hosts)}: ")


def test_hosts_that_fail_alike_share_an_error() -> None:
    shown = Shown("a1", "a2")
    lost = [
        ConnectError(host, f"connecting to {host}", "refused", hint=f"try `ssh {host}`")
        for host in ("a1", "a2")
    ]
    _, err = shown.finish(*(Outcome(error.host, error=error) for error in lost), code=3)
    assert err.splitlines() == [
        "error: a[1-2]: connecting to a1: refused (shown for a1; same on the others)",
        "hint: try `ssh a1` (shown for a1; same on the others)",
        "dtrain: 2 of 2 hosts failed",
    ]

"""`dtrain ps`: hosts in the same state share a line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.runs.progress import Progress
from dtrain.runs.prune import OldRun
from dtrain.runs.status import HostStatus, ProcessStatus, RunStatus
from dtrain_cli.views import runs
from dtrain_cli.views.paper import Paper

PIPE = Paper(100, color=False, unicode=False)
NOW = 1e9


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "age", lambda since: NOW - since)


def run(hosts: dict[str, HostStatus]) -> RunStatus:
    return RunStatus("run-1", "/runs/run-1", NOW, workers=8, in_charge=7, hosts=hosts)


def lines(hosts: dict[str, HostStatus]) -> list[str]:
    return runs.details(run(hosts), PIPE).split("\n\n", 1)[1].splitlines()


def process(label: str, *, ended: float | None = None, code: int | None = None) -> ProcessStatus:
    return ProcessStatus(label, 99, 0.0, ended, code, None)


def test_hosts_in_the_same_state_are_folded() -> None:
    names = [f"node{number}" for number in (1, 2, 3, 4)]
    hosts = {name: HostStatus("running", NOW - 100 - at) for at, name in enumerate(names)}
    assert lines(hosts) == ["node[1-4]  running       for 1 min 40 s"]
    hosts["node2"] = HostStatus("unreachable", NOW - 5, "no route")
    assert lines(hosts) == [
        "node[1,3-4]  running       for 1 min 40 s",
        "node2        unreachable   for 5 s  no route",
    ]
    assert "  node[1-4]  " in runs.table([run(hosts)], PIPE, of=1)


def test_a_restarted_job_shows_why() -> None:
    first = run({"n1": HostStatus("running", NOW)})
    assert "attempt" not in runs.details(first, PIPE)
    again = replace(first, attempt=2, failure="rank 0 on n1 exited with status 1")
    assert "attempt  2, after rank 0 on n1 exited with status 1\n" in runs.details(again, PIPE)


def test_processes_of_folded_hosts_share_a_line() -> None:
    running = {
        f"n{node}": HostStatus(
            "running", None, processes=(process(str(2 * node)), process(str(2 * node + 1)))
        )
        for node in range(3)
    }
    assert lines(running) == ["n[0-2]  running       ranks 0-5 running"]
    failed = (process("2", ended=NOW - 3, code=1), process("3"))
    running["n1"] = HostStatus("running", None, processes=failed)
    assert lines(running) == [
        "n[0,2]  running       ranks 0-1,4-5 running",
        "n1      running       rank 2 exited with status 1, 3 s ago; rank 3 running",
    ]


def test_processes_of_a_host_that_was_restarted_are_not_shown_as_running() -> None:
    gone = HostStatus("gone", None, "it was restarted", processes=(process("0"), process("1")))
    assert lines({"n1": gone}) == ["n1  gone          ranks 0-1 lost  it was restarted"]


def test_a_narrow_terminal_shows_whole_names() -> None:
    name = "gpt-20261127-042039-572311"
    narrow = Paper(40, color=False, unicode=True, terminal=True)
    shown = runs.table([replace(run({}), run=name)], narrow, of=1).splitlines()
    assert shown == [name, "  running, started 0 s ago"]
    shown = runs.old([OldRun(replace(run({}), run=name), 2048)], narrow).splitlines()
    assert shown[:2] == [name, "  running, started 0 s ago, 2.05 kB"]


def test_a_table_for_a_narrow_terminal_cuts_no_word() -> None:
    report = Progress("rank-0", 1.0, 1200, 5000, 0.5, None, {})
    one = replace(run({"n1": HostStatus("running", None)}), run="gpt-20261127-042039-572311")
    two = replace(run({f"node{n}": HostStatus("running", None) for n in (1, 2)}), progress=report)
    for width in range(40, 100):
        narrow = Paper(width, color=False, unicode=True, terminal=True)
        text = runs.table([one, two], narrow, of=2)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert not [line for line in lines if line != line.rstrip()]
        assert all(word in text for word in (one.run, "n1", "run-1", "node[1-2]"))
        assert "1,200/5,000" in text or "step 1,200 of 5,000 · loss 0.5" in text
    # No run has progress.
    narrow = Paper(60, color=False, unicode=True, terminal=True)
    assert runs.table([one], narrow, of=1).split()[:4] == ["RUN", "STATE", "STARTED", "HOSTS"]


def test_names_are_not_markup() -> None:
    hosts = {"[bold]gpu[/bold]": HostStatus("lost", None, ":smile: [red]x[/] /tmp/1.5")}
    terminal = Paper(100, color=True, unicode=True, terminal=True)
    text = runs.details(run(hosts), terminal)
    assert ":smile: [red]x[/] /tmp/1.5\n" in text
    assert "[bold]gpu[/bold]" in text


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.NODE_FAILED])
def test_one_empty_line_is_above_the_report(code: ExitCode) -> None:
    over = replace(run({"n": HostStatus("ended", None)}), report=Report(code, "the reason"))
    assert "n  ended\n\n" in (text := runs.details(over, PIPE))
    assert "\n\n\n" not in text


@pytest.mark.parametrize("paper", [PIPE, Paper(80, color=False, unicode=True, terminal=True)])
def test_only_the_details_of_a_run_name_all_its_hosts(paper: Paper) -> None:
    names = [f"ip-10-{number}-253-{9 * number}.us-west-2.compute.internal" for number in range(9)]
    one = run({name: HostStatus("running", NOW - 5) for name in names})
    details = runs.details(one, paper)
    whole = "".join(line.split("  ")[0] for line in details.splitlines())
    assert ",".join(names) in whole
    assert "running" in details and "for 5 s" in details
    assert "5 more" in runs.table([one], PIPE, of=1)

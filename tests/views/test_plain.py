"""Plain lines in pipes: complete, in order, and without delays for the run."""

import os
import threading
import time
from collections import defaultdict
from datetime import datetime
from functools import partial

import pytest

from dtrain.checks.finding import error, warning
from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Failure, Report
from dtrain.runs import events
from dtrain_cli.views import Filters, make_view
from dtrain_cli.views import plain as plain_view
from dtrain_cli.views.bars import Bars
from dtrain_cli.views.folding import LineFolder
from support.limits import HANG, until
from support.runs import Capture, plan

DONE = Report(ExitCode.OK, "all 4 workers finished", seconds=41, logs="/runs/demo-1")


class Shown:
    """A plain view that writes to two pipes."""

    def __init__(self, fold=False, json=False, filters=None, timestamps=False):
        self.out, self.err = Capture(), Capture()
        self.broken = threading.Event()
        self.view = make_view(
            self.out.stream,
            self.err.stream,
            filters or Filters(),
            self.broken.set,
            json=json,
            fold=fold,
            timestamps=timestamps,
        )

    def finish(self, report=DONE):
        self.view.on_event(events.Finished(report))
        assert self.view.wait(HANG)
        return self.out.text(), self.err.text()


def test_the_output_of_a_small_run(workers):
    shown = Shown()
    shown.view.on_event(
        events.RunLaunched("demo-1", plan(), os.path.expanduser("~/.dtrain/runs/demo-1"))
    )
    for state in ("connecting", "preparing", "ready", "running"):
        for host in ("node0", "node1"):
            shown.view.on_event(events.HostState(host, state))
    stream = workers.stream("node1", 3)
    shown.view.output(stream, workers.write(stream, b"hello\nunfinished"))
    shown.view.notice("stopping on request\nplease wait")
    out, err = shown.finish()
    assert out == "[node1 3] hello\n[node1 3] unfinished\n"
    assert err.splitlines() == [
        "dtrain: run demo-1, logs in ~/.dtrain/runs/demo-1",
        "dtrain: starting 4 workers on 2 hosts (node[0-1])",
        "dtrain: 4 workers started",
        "dtrain: stopping on request",
        "dtrain: please wait",
        "dtrain: done in 41 s: all 4 workers finished; logs in /runs/demo-1",
    ]


def test_stdout_and_stderr_stay_apart_and_prefixes_align(workers):
    shown = Shown()
    shown.view.on_event(events.RunLaunched("demo-1", plan(hosts=6, workers=2), "/runs/demo-1"))
    for rank, fd, text in ((3, "stdout", b"out\n"), (11, "stderr", b"err\n")):
        stream = workers.stream(f"node{rank // 2}", rank, fd)
        shown.view.output(stream, workers.write(stream, text))
    out, err = shown.finish()
    assert out == "[node1  3] out\n"
    assert "[node5 11] err\n" in err
    assert "(node[0-5])" in err


def test_a_million_lines_of_many_streams_are_complete(workers):
    shown = Shown()
    streams = [workers.stream("node0", rank) for rank in range(4)]
    sent = defaultdict(list)
    for batch in range(50):
        for stream in streams:
            lines = [f"{batch} {number}" for number in range(5000)]
            sent[str(stream.rank)] += lines
            data = "".join(f"{line}\n" for line in lines).encode()
            shown.view.output(stream, workers.write(stream, data))
    out, _ = shown.finish()
    got = defaultdict(list)
    for line in out.splitlines():
        prefix, _, text = line.partition("] ")
        got[prefix.removeprefix("[node0 ")].append(text)
    assert got == sent


@pytest.mark.parametrize("fold", [False, True])
def test_timestamps(workers, monkeypatch, fold):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        shown = Shown(fold=fold, timestamps=True)
        stream = workers.stream("node0", 0)
        for second, text in ((0.5, b"a\nb\nc"), (86399.5, b"\nd\n"), (86400.0, b"unfinished")):
            size = workers.write(stream, text, lambda second=second: second)
        shown.view.output(stream, size)
        old = workers.stream("node0", 1)
        size = workers.write(old, b"old\n")
        old.path.with_name(".worker-1.out.times").unlink()
        shown.view.output(old, size)
        out, _ = shown.finish()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert out.splitlines() == [
        "[node0 0] 1970-01-01T09:00:00+09:00 a",
        "[node0 0] 1970-01-01T09:00:00+09:00 b",
        "[node0 0] 1970-01-02T08:59:59+09:00 c",
        "[node0 0] 1970-01-02T08:59:59+09:00 d",
        "[node0 1] - old",
        "[node0 0] 1970-01-02T09:00:00+09:00 unfinished",
    ]


def test_a_stopped_reader_does_not_delay_the_run(workers):
    out, err = Capture(stopped=True), Capture()
    view = make_view(out.stream, err.stream, Filters(), lambda: None)
    stream = workers.stream("node0", 0)
    size = workers.write(stream, b"some text\n" * 500_000)
    for number in range(10_000):
        view.output(stream, size * number // 9_999)
        view.on_event(events.HostState("node0", "running"))
    view.on_event(events.Finished(DONE))
    # Nothing was read yet, so code that waits for the reader would hang here.
    assert not view.wait(0.2)
    out.resume()
    assert view.wait(HANG)
    assert out.data() == b"[node0 0] some text\n" * 500_000


def test_a_muted_view_skips_output_that_waits(workers):
    out, err = Capture(stopped=True), Capture()
    view = make_view(out.stream, err.stream, Filters(), lambda: None)
    stream = workers.stream("node0", 0)
    view.output(stream, workers.write(stream, b"some text\n" * 1_000_000))
    view.mute()
    view.on_event(events.Finished(DONE))
    out.resume()
    assert view.wait(HANG)
    assert len(out.data()) < 10_000_000
    assert "done in" in err.text()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), {"0", "1", "2", "3"}),
        (Filters(ranks=frozenset({1, 2})), {"1", "2"}),
        (Filters(hosts=frozenset({"node1"})), {"2", "3"}),
        (Filters(ranks=frozenset({1, 2}), hosts=frozenset({"node1"})), {"2"}),
    ],
)
def test_filters(workers, filters, expected):
    shown = Shown(filters=filters)
    for rank in range(4):
        stream = workers.stream(f"node{rank // 2}", rank)
        shown.view.output(stream, workers.write(stream, b"%d\n" % rank))
    out, _ = shown.finish()
    assert {line[-1] for line in out.splitlines()} == expected


@pytest.fixture
def patient_folder(monkeypatch):
    """Lines wait for each other however slow this machine is; the end of the run shows them."""
    monkeypatch.setattr(plain_view, "LineFolder", partial(LineFolder, window=HANG))


def test_folded_on_request(workers, patient_folder):
    shown = Shown(fold=True)
    shown.view.on_event(events.RunLaunched("demo-1", plan(hosts=8, workers=2), "/runs/demo-1"))
    for rank in range(16):
        stream = workers.stream(f"node{rank // 2}", rank)
        own = b"mine\n" if rank == 0 else b""
        shown.view.output(stream, workers.write(stream, b"loading\n" + own + b"epoch 1\n"))
    out, _ = shown.finish()
    assert "[node[0-7] 0-15] loading\n" in out
    assert "[node[0-7] 0-15] epoch 1\n" in out
    assert "[node0  0] mine\n" in out


def test_folded_lines_are_shown_when_only_the_output_ends(workers, patient_folder):
    shown = Shown(fold=True)
    for rank in range(2):
        stream = workers.stream("node0", rank)
        shown.view.output(stream, workers.write(stream, b"loading\n"))
    shown.view.close()
    assert shown.view.wait(HANG)
    assert shown.out.text() == "[node0 0-1] loading\n"


def test_hostile_output_and_names_are_harmless(workers):
    shown = Shown()
    stream = workers.stream("node0", 0)
    attack = b"\x1b]0;owned\x07\x1b[2J[red]x[/red] \xff\n"
    shown.view.output(stream, workers.write(stream, attack))
    shown.view.notice("\x1b[2Jmoved")
    shown.view.on_event(events.RunLaunched("demo\x1b[2J", plan(), "/runs/\x1b]0;t\x07"))
    out, err = shown.finish()
    assert out == "[node0 0] [red]x[/red] \\xff\n"
    assert "\x1b" not in err


def test_a_removed_log_file_is_reported_and_skipped(workers):
    shown = Shown()
    stream = workers.stream("node0", 0)
    size = workers.write(stream, b"gone\n")
    stream.path.unlink()
    shown.view.output(stream, size)
    out, err = shown.finish()
    assert out == ""
    assert "cannot show this output" in err
    assert "done in" in err


def test_color_in_a_pipe_only_when_forced(workers, monkeypatch):
    text = b"\x1b[31mred\x1b[0m\n"
    shown = Shown()
    stream = workers.stream("node0", 0)
    shown.view.output(stream, workers.write(stream, text))
    assert shown.finish()[0] == "[node0 0] red\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = Shown()
    shown.view.output(stream, stream.path.stat().st_size)
    assert "\x1b[31mred" in shown.finish()[0]


def test_a_lost_host_is_reported_immediately_and_the_report_comes_last(workers):
    shown = Shown()
    shown.view.on_event(events.RunLaunched("demo-1", plan(), "/runs/demo-1"))
    for state in ("running", "unreachable", "running", "unreachable", "stopping", "lost"):
        shown.view.on_event(events.HostState("node1", state, "no route"))
    report = Report(
        ExitCode.NODE_FAILED, "node1: connecting: no route to host", hint="is it on?", seconds=3
    )
    _, err = shown.finish(report)
    assert err.splitlines()[2:] == [
        "dtrain: node1 cannot be reached; its workers keep running, reconnecting",
        "dtrain: all hosts are reachable again",
        "dtrain: node1 cannot be reached; its workers keep running, reconnecting",
        "",
        "error: node1: connecting: no route to host",
        "hint: is it on?",
        "dtrain: failed after 3.0 s",
    ]


def test_the_last_line_of_a_failed_worker_precedes_the_report(workers):
    shown = Shown()
    stream = workers.stream("node0", 0, "stderr")
    shown.view.output(stream, workers.write(stream, b"last words"))
    failure = Failure("node0", "worker", 0, 0, 0.0, signal="SIGKILL")
    _, err = shown.finish(Report(ExitCode.JOB_FAILED, failure.summary, (failure,)))
    assert err.index("last words") < err.index("error: rank 0 on node0 was killed by SIGKILL")


def test_an_error_of_the_view_reaches_the_waiter(workers):
    shown = Shown()
    shown.view.on_event(events.RunLaunched("demo-1", None, "/runs/demo-1"))
    with pytest.raises(AttributeError):
        shown.view.wait(HANG)


def test_errors_are_shown_completely_and_warnings_as_one_line():
    shown = Shown()
    shown.view.on_event(events.RunLaunched("demo-1", plan(), "/runs/demo-1"))
    shown.view.on_event(
        events.Findings(
            [
                error(
                    "script", ["node1"], "there is no a\x1b[2J.py", "a.py is there", "copy it there"
                ),
                warning("mtu", ["node0", "node1"], "eth0 has MTU 1400", "1500", "ip link set"),
            ]
        )
    )
    _, err = shown.finish()
    assert err.splitlines()[2:11] == [
        "",
        "error    node1: script",
        "         there is no a.py",
        "         expected a.py is there",
        "         remedy   copy it there",
        "",
        "dtrain: warning: node[0-1] (all 2): mtu: eth0 has MTU 1400",
        "dtrain: `dtrain check FILE` shows the remedies",
        "dtrain: done in 41 s: all 4 workers finished; logs in /runs/demo-1",
    ]


def test_many_warnings_are_counted():
    shown = Shown()
    shown.view.on_event(events.RunLaunched("demo-1", plan(), "/runs/demo-1"))
    found = [warning("disk", ["node0"], f"{size} MiB are free", "1 GiB", "") for size in range(64)]
    shown.view.on_event(events.Findings(found))
    _, err = shown.finish()
    assert err.count("MiB are free") == 6
    assert "dtrain: 58 more warnings; `dtrain check FILE` shows the remedies\n" in err


def test_the_state_of_a_progress_bar_appears_in_a_pipe(workers, monkeypatch):
    monkeypatch.setattr(Bars.__init__, "__defaults__", (0.01,))
    shown = Shown()
    shown.view.on_event(events.RunLaunched("demo-1", plan(), "/runs/demo-1"))
    stream = workers.stream("node0", 0)
    shown.view.output(stream, workers.write(stream, b"\r 10%|#   |\r 50%|##  |"))
    until(lambda: "[node0 0]  50%|##  |\n" in shown.out.so_far())
    shown.view.output(stream, workers.write(stream, b"\r100%|####|\n"))
    out, _ = shown.finish()
    assert out.endswith("[node0 0] 100%|####|\n")


def test_a_bar_that_stands_still_is_shown_once_with_its_time(workers, monkeypatch):
    monkeypatch.setattr(Bars.__init__, "__defaults__", (0.01,))
    shown = Shown(timestamps=True)
    still, other = workers.stream("node0", 0), workers.stream("node0", 1)
    shown.view.output(still, workers.write(still, b"\rwaiting", lambda: 0))
    until(lambda: "waiting\n" in shown.out.so_far())
    shown.view.output(still, workers.write(still, b"\rwaiting", lambda: 86400))
    shown.view.output(other, workers.write(other, b"\rbusy", lambda: 86400))
    until(lambda: "busy\n" in shown.out.so_far())  # due after the first one
    shown.view.output(still, workers.write(still, b"\rdone\n", lambda: 86400))
    out, _ = shown.finish()
    assert [line for line in out.splitlines() if "waiting" in line] == [
        f"[node0 0] {datetime.fromtimestamp(0).astimezone().isoformat()} waiting"
    ]

"""A live view on a pseudo-terminal: the screen that a user sees."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import tty

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.runs.progress import Progress
from dtrain_cli.views import Filters, make_view
from support.limits import HANG
from support.runs import plan
from support.screen import Screen

DONE = Report(ExitCode.OK, "all 4 workers finished", seconds=41, logs="/runs/demo-1")
HEADER = "── demo-1 · running"


class Terminal:
    """A pseudo-terminal with a thread that reads it."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._master, slave = pty.openpty()
        tty.setraw(slave)
        self.resize(columns, rows)
        self.stdout = os.fdopen(slave, "w", encoding="utf-8")
        self.stderr = os.fdopen(os.dup(slave), "w", encoding="utf-8")
        self.raw = b""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.columns, self.rows = columns, rows

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 1 << 16)
            except OSError:
                break
            with self._changed:
                self.raw += piece
                self._changed.notify_all()

    def wait_for(self, text: str, after: int = 0) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: text.encode() in self.raw[after:], 30)
        assert found, f"no {text!r} in the end of the output, {self.raw[-1000:]!r}"

    def screen(self) -> list[str]:
        """The current screen. The terminal's size must not have changed."""
        screen = Screen(self.columns, self.rows)
        screen.feed(self.raw.decode(errors="ignore").replace("\n", "\r\n"))
        return screen.lines()

    def close(self) -> list[str]:
        self.stdout.close()
        self.stderr.close()
        self._thread.join(HANG)
        os.close(self._master)
        return self.screen()


@pytest.fixture(autouse=True)
def colorless(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def terminal():
    return Terminal()


def live(terminal, **options):
    return make_view(
        False,
        options.get("stdout", terminal.stdout),
        terminal.stderr,
        Filters(),
        options.get("fold", False),
        lambda: None,
    )


def running(view):
    view.started("demo-1", plan(), "/runs/demo-1")
    for host in ("node0", "node1"):
        view.host_state(host, "running")


def finish(view):
    view.finished(DONE)
    assert view.wait(HANG)


def test_lines_scroll_above_the_header_until_it_is_removed_at_the_end(terminal, workers):
    view = live(terminal)
    running(view)
    out, err = workers.stream("node0", 0), workers.stream("node1", 3, "stderr")
    view.output(out, workers.write(out, b"step 1\n"))
    view.output(err, workers.write(err, b"warned\n"))
    terminal.wait_for("[node0 0] step 1\n")
    terminal.wait_for("2 hosts running")
    view.output(out, workers.write(out, b"step 2\n"))
    terminal.wait_for("   [node0 0] step 2")
    screen = terminal.screen()
    assert screen[-3].startswith(HEADER)
    assert screen[-2:] == ["   2 hosts running · 4 workers", "   [node0 0] step 2"]
    finish(view)
    assert terminal.close() == [
        "dtrain: run demo-1, logs in /runs/demo-1",
        "dtrain: starting 4 workers on 2 hosts (node[0-1])",
        "[node0 0] step 1",
        "[node1 3] warned",
        "[node0 0] step 2",
        "dtrain: done in 41 s: all 4 workers finished; logs in /runs/demo-1",
        "",
    ]


def test_progress_replaces_the_last_line(terminal, workers):
    view = live(terminal)
    running(view)
    stream = workers.stream("node0", 0)
    view.output(stream, workers.write(stream, b"compiling\n"))
    terminal.wait_for("   [node0 0] compiling")
    view.progress("node0", Progress("rank-0", 0.0, 1, 10, 2.5, None, {}))
    terminal.wait_for("step 1 of 10")
    view.output(stream, workers.write(stream, b"more\n"))
    view.progress("node0", Progress("rank-0", 2.0, 3, 10, 2.25, None, {}))
    terminal.wait_for("step 3 of 10")
    assert terminal.screen()[-1] == "   step 3 of 10 · loss 2.25 · 1.0 steps/s · 7 s left"
    finish(view)
    assert not any("step" in line for line in terminal.close())


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (20, 10), (40, 3), (80, 1)])
def test_nothing_is_garbled_at_any_size(workers, columns, rows):
    terminal = Terminal(columns, rows)
    view = live(terminal)
    running(view)
    streams = [
        workers.stream(f"node{rank // 2}", rank, fd)
        for rank in range(4)
        for fd in ("stdout", "stderr")
    ]
    for number in range(300):
        for stream in streams:
            text = f"{stream.fd} {number}\n"
            view.output(stream, workers.write(stream, text.encode()))
    finish(view)
    lines = terminal.close()
    # Lines of the log may be wrapped, but not cut, and no header remains between them.
    assert "──" not in "".join(lines)
    text = "".join(lines).replace("[node", "\n[node").splitlines()
    for stream in streams:
        head = f"[{stream.host} {stream.rank}] {stream.fd} "
        shown = [line.removeprefix(head) for line in text if line.startswith(head)]
        assert [re.match("[0-9]+", each)[0] for each in shown] == [str(n) for n in range(300)]
    assert "done in 41 s" in "".join(lines)


def test_a_bar_without_an_end_is_in_the_header_and_once_in_the_log(terminal, workers):
    view = live(terminal)
    running(view)
    stream = workers.stream("node0", 0, "stderr")
    for percent in (10, 50, 90):
        view.output(stream, workers.write(stream, b"\r%d%% done" % percent))
        terminal.wait_for(f"   [node0 0] {percent}% done")
    finish(view)
    lines = terminal.close()
    assert "[node0 0] 90% done" in lines
    assert "50%" not in "".join(lines)


def test_the_lowest_rank_is_followed(terminal, workers):
    view = live(terminal)
    running(view)
    for rank in (1, 0, 2):
        stream = workers.stream(f"node{rank // 2}", rank)
        view.output(stream, workers.write(stream, b"from %d\n" % rank))
        terminal.wait_for(f"[node{rank // 2} {rank}] from {rank}\n")
    finish(view)
    assert b"   [node0 1] from" in terminal.raw
    assert b"   [node0 0] from" in terminal.raw
    assert b"   [node1 2] from" not in terminal.raw
    terminal.close()


def test_a_paused_view_does_not_write(terminal, workers):
    view = live(terminal)
    running(view)
    terminal.wait_for(HEADER)
    with view.pause():
        terminal.stderr.write("Passphrase: \n")
        terminal.stderr.flush()
        terminal.wait_for("Passphrase")
        written = len(terminal.raw)
        stream = workers.stream("node0", 0)
        view.output(stream, workers.write(stream, b"meanwhile\n"))
        view.notice("later")
        assert "──" not in "".join(terminal.screen())
        assert len(terminal.raw) == written
    terminal.wait_for("] meanwhile")
    finish(view)
    lines = terminal.close()
    assert lines.index("Passphrase:") < lines.index("dtrain: later")


def test_output_of_other_programs_does_not_damage_the_header_or_the_log(terminal):
    view = live(terminal)
    running(view)
    terminal.wait_for("workers\r\x1b[2A")
    for text in ("^C", "ssh: from elsewhere\r\n", "\r\n"):
        written = len(terminal.raw)
        # The terminal's echo and the output of a ProxyCommand appear at the cursor.
        os.write(terminal.stderr.fileno(), text.encode())
        view.notice("after it")
        terminal.wait_for("workers\r\x1b[2A", written)
    finish(view)
    lines = terminal.close()
    assert "──" not in "".join(lines)
    assert "hosts running" not in "".join(lines)
    assert lines[2:] == [
        "dtrain: after it",
        "ssh: from elsewhere",
        "dtrain: after it",
        "",
        "dtrain: after it",
        "dtrain: done in 41 s: all 4 workers finished; logs in /runs/demo-1",
        "",
    ]


def test_a_new_size_does_not_change_what_is_erased():
    """The cursor stays above the header, even if the terminal rewraps it."""
    terminal = Terminal(80, 24)
    view = live(terminal)
    running(view)
    terminal.wait_for("2 hosts running")
    written = len(terminal.raw)
    terminal.resize(30, 24)
    view.notice("narrow")
    terminal.wait_for("\x1b[2A", written)
    erased, drawn = terminal.raw[written:].split(b"dtrain: narrow")
    assert erased == b"\r\x1b[J"
    assert drawn.endswith(b"\r\x1b[2A")
    finish(view)
    terminal.close()


def test_colors_only_on_terminals_that_support_them(workers, monkeypatch):
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)  # An empty value has no effect.
        terminal = Terminal()
        view = live(terminal)
        running(view)
        stream = workers.stream("node0", 0)
        workers.write(stream, b"\x1b[31mred\n")
        view.output(stream, stream.path.stat().st_size)
        finish(view)
        terminal.close()
        assert (b"\x1b[31mred" in terminal.raw) == (b"m[node0 0]" in terminal.raw)
        assert (b"\x1b[31mred" in terminal.raw) == (not no_color)


def test_a_dumb_terminal_gets_plain_lines(terminal, workers, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    view = live(terminal)
    running(view)
    finish(view)
    terminal.close()
    assert b"\x1b" not in terminal.raw


def test_output_in_a_file_keeps_the_header_on_the_terminal(terminal, workers, tmp_path):
    with open(tmp_path / "out.txt", "w") as file:
        view = live(terminal, stdout=file)
        running(view)
        stream = workers.stream("node0", 0)
        view.output(stream, workers.write(stream, b"\x1b[31mto the file\n"))
        terminal.wait_for("   [node0 0] ")
        finish(view)
    lines = terminal.close()
    assert (tmp_path / "out.txt").read_text() == "[node0 0] to the file\n"
    assert "[node0 0] to the file" not in lines


def test_no_header_if_stdout_is_a_pipe(terminal, workers):
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        view = live(terminal, stdout=pipe)
        running(view)
        finish(view)
    os.close(read)
    assert "──" not in "\n".join(terminal.close())


def test_a_closed_terminal_is_a_closed_reader(terminal):
    broken = threading.Event()
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as gone:
        view = make_view(False, gone, gone, Filters(), False, broken.set)
        running(view)
        os.close(master)
        view.notice("anybody there?")
        assert broken.wait(HANG)
        finish(view)
    terminal.close()


def test_importing_the_views_is_cheap():
    heavy = ("rich", "json", "paramiko", "yaml", "dtrain.launchplan", "dtrain_cli.views.live")
    code = f"import dtrain_cli.views, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=dict(os.environ)
    )
    assert run.stdout == b"[]\n"


def test_output_into_a_pipe_does_not_import_rich():
    code = """
import sys
from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain_cli.views import Filters, make_view
view = make_view(False, sys.stdout, sys.stderr, Filters(), False, lambda: None)
view.notice("going on")
view.finished(Report(ExitCode.OK, "done", seconds=1, logs=""))
assert view.wait(60)
sys.exit("rich" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert b"dtrain: going on" in run.stderr

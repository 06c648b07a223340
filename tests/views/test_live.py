"""The live view on a pseudo-terminal: the screen that a user sees."""

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
from rich.text import Text

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.messages.telemetry import Sample
from dtrain.runs import events
from dtrain.runs.progress import Progress
from dtrain_cli.views import Display, Filters, make_view
from dtrain_cli.views.canvas import frame
from support.limits import HANG
from support.runs import plan
from support.screen import Screen

DONE = Report(ExitCode.OK, "all 4 workers finished", seconds=41, logs="/runs/demo-1")
OUTPUT = "── output ──"


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
            found = self._changed.wait_for(lambda: text.encode() in self.raw[after:], HANG)
        assert found, f"no {text!r} in the end of the output, {self.raw[-1000:]!r}"

    def until(self, condition, after: int = 0) -> None:
        """Wait until the screen is as wanted: ``condition`` gets it."""
        with self._changed:
            found = self._changed.wait_for(lambda: condition(self.screen(after)), HANG)
        assert found, self.screen(after).display

    def screen(self, after: int = 0) -> Screen:
        """What the output from byte ``after`` on shows. Until then the size must not change."""
        screen = Screen(self.columns, self.rows)
        screen.feed(self.raw[after:].decode(errors="ignore").replace("\n", "\r\n"))
        return screen

    def close(self) -> list[str]:
        """The lines that stay on the terminal."""
        self.stdout.close()
        self.stderr.close()
        self._thread.join(HANG)
        os.close(self._master)
        screen = self.screen()
        assert not screen.alternate
        assert not screen.cursor.hidden
        return screen.everything()


@pytest.fixture(autouse=True)
def colorless(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("dtrain_cli.views.live.ENTER_AFTER", 0.0)


@pytest.fixture
def terminal():
    return Terminal()


def live(terminal, **options):
    stdout = options.pop("stdout", terminal.stdout)
    return make_view(stdout, terminal.stderr, Filters(), lambda: None, **options)


def running(view):
    view.on_event(events.RunLaunched("demo-1", plan(), "/runs/demo-1"))
    for host in ("node0", "node1"):
        view.on_event(events.HostState(host, "running"))


def dashboard(terminal, *texts):
    """Wait until the dashboard shows the texts."""

    def ready(screen):
        return screen.alternate and all(
            any(text in line for line in screen.display) for text in (OUTPUT, *texts)
        )

    terminal.until(ready)
    return [line.rstrip() for line in terminal.screen().display]


def finish(view):
    view.on_event(events.Finished(DONE))
    assert view.wait(HANG)


def test_the_dashboard_leaves_only_the_output_behind(terminal, workers):
    view = live(terminal)
    view.on_event(events.RunLaunched("demo-1", plan(), "/runs/demo-1"))
    view.on_event(events.HostState("node0", "connecting"))
    terminal.wait_for("starting 4 workers")
    assert not terminal.screen().alternate  # a ProxyCommand may ask for a password now
    running(view)
    out, err = workers.stream("node0", 0), workers.stream("node1", 3, "stderr")
    view.output(out, workers.write(out, b"step 1\n"))
    view.output(err, workers.write(err, b"warned\n"))
    view.on_event(events.ProgressReported("node0", Progress("rank-0", 0.0, 1, 10, 2.5, None, {})))
    view.on_event(events.Sampled("node1", Sample(1.0, 4, 2.0, (1, 4), None, None, None, (), ())))
    screen = dashboard(terminal, "step 1 of 10 · loss 2.5", " 50%  25%", "[node1 3] warned")
    assert re.match(r" demo-1  \d+ s · 2 hosts running · 4 workers", screen[0])
    assert screen.index("[node0 0] step 1") > next(
        at for at, line in enumerate(screen) if line.startswith(OUTPUT)
    )
    # The terminal's echo appears at the cursor, and the next frame replaces it.
    os.write(terminal.stderr.fileno(), b"^C")
    terminal.wait_for("^C")
    terminal.wait_for("\x1b[?2026l", terminal.raw.index(b"^C"))
    assert not any("^C" in line for line in terminal.screen().display)
    view.output(out, workers.write(out, b"step 2\n"))
    finish(view)
    assert terminal.close() == [
        "dtrain: run demo-1, logs in /runs/demo-1",
        "dtrain: starting 4 workers on 2 hosts (node[0-1])",
        "dtrain: run demo-1, logs in /runs/demo-1",
        "dtrain: starting 4 workers on 2 hosts (node[0-1])",
        "dtrain: 4 workers started",
        "[node0 0] step 1",
        "[node1 3] warned",
        "[node0 0] step 2",
        "dtrain: done in 41 s: all 4 workers finished; logs in /runs/demo-1",
        "",
    ]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (20, 10), (40, 3), (80, 1)])
def test_no_output_is_lost_at_any_size(workers, columns, rows):
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
    text = "".join(terminal.close()).replace("[node", "\n[node")
    for stream in streams:
        head = f"[{stream.host} {stream.rank}] {stream.fd} "
        found = [line.removeprefix(head) for line in text.splitlines() if line.startswith(head)]
        # The report follows the last line without a newline.
        assert [int(each.partition("dtrain")[0]) for each in found] == list(range(300))
    assert OUTPUT not in text


def test_long_output_is_cut_with_a_hint(terminal, workers, monkeypatch):
    monkeypatch.setattr("dtrain_cli.views.live._KEPT", 100)
    view = live(terminal)
    running(view)
    dashboard(terminal)
    stream = workers.stream("node0", 0)
    for first in (0, 10):
        for number in range(first, first + 10):
            view.output(stream, workers.write(stream, b"line %d\n" % number))
        dashboard(terminal, f"line {first + 9}")
    finish(view)
    lines = terminal.close()
    assert "dtrain: `dtrain logs demo-1` shows earlier output" in lines
    assert "[node0 0] line 0" not in lines
    assert "[node0 0] line 19" in lines


def test_a_bar_without_an_end_is_shown_and_once_in_the_log(terminal, workers):
    view = live(terminal)
    running(view)
    stream = workers.stream("node0", 0, "stderr")
    for percent in (10, 50, 90):
        view.output(stream, workers.write(stream, b"\r%d%% done" % percent))
        dashboard(terminal, f"[node0 0] {percent}% done")
    finish(view)
    lines = terminal.close()
    assert "[node0 0] 90% done" in lines
    assert "50%" not in "".join(lines)


def test_a_paused_view_does_not_write(terminal, workers):
    view = live(terminal)
    running(view)
    dashboard(terminal)
    with view.pause():
        terminal.stderr.write("Passphrase: \n")
        terminal.stderr.flush()
        terminal.wait_for("Passphrase")
        assert not terminal.screen().alternate
        written = len(terminal.raw)
        stream = workers.stream("node0", 0)
        view.output(stream, workers.write(stream, b"meanwhile\n"))
        view.notice("later")
        assert len(terminal.raw) == written
    dashboard(terminal, "] meanwhile")
    finish(view)
    lines = terminal.close()
    assert lines.index("Passphrase:") < lines.index("dtrain: later")


def test_a_new_size_is_used(terminal):
    view = live(terminal)
    running(view)
    dashboard(terminal)
    written = len(terminal.raw)
    terminal.resize(30, 10)

    def fits(screen):
        name = screen.display[0].strip()
        alone = name and " · " not in name
        return alone and any(line.startswith(OUTPUT) for line in screen.display)

    terminal.until(fits, written)
    finish(view)
    terminal.resize(80, 24)
    terminal.close()


def test_control_sequences_and_markup_of_workers_stay_text(terminal, workers, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    view = live(terminal)
    running(view)
    stream = workers.stream("node0", 0)
    evil = b"\x1b[?1049l\x1b[2J\x1b]0;title\x07\x1b[99;99H[bold]b[/bold]\x1b[31mred\x9b2J\n"
    view.output(stream, workers.write(stream, evil))
    dashboard(terminal, "[bold]b[/bold]", "red")
    finish(view)
    terminal.close()
    assert b"title\x07" not in terminal.raw
    assert terminal.raw.count(b"\x1b[?1049l") == 1


@pytest.mark.parametrize("display", [Display.PLAIN, Display.QUIET])
def test_other_displays_move_no_cursor(terminal, workers, display):
    view = live(terminal, display=display)
    running(view)
    stream = workers.stream("node0", 0)
    view.output(stream, workers.write(stream, b"step 1\n"))
    view.on_event(events.ProgressReported("node0", Progress("rank-0", 0.0, 1, 10, 2.5, None, {})))
    finish(view)
    lines = terminal.close()
    assert b"\x1b" not in terminal.raw
    assert ("[node0 0] step 1" in lines) == (display is Display.PLAIN)
    assert ("dtrain: step 1 of 10 · loss 2.5" in lines) == (display is Display.PLAIN)
    assert "dtrain: 4 workers started" in lines


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


def test_output_in_a_file_keeps_the_dashboard_on_the_terminal(terminal, workers, tmp_path):
    with open(tmp_path / "out.txt", "w") as file:
        view = live(terminal, stdout=file)
        running(view)
        dashboard(terminal)
        stream = workers.stream("node0", 0)
        view.output(stream, workers.write(stream, b"\x1b[31mto the file\n"))
        dashboard(terminal, "[node0 0] to the file")
        assert (tmp_path / "out.txt").read_text() == "[node0 0] to the file\n"
        finish(view)
    assert "[node0 0] to the file" not in terminal.close()


def test_no_dashboard_if_stdout_is_a_pipe(terminal, workers):
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        view = live(terminal, stdout=pipe)
        running(view)
        finish(view)
    os.close(read)
    terminal.close()
    assert b"\x1b[?1049h" not in terminal.raw


def test_a_closed_terminal_is_a_closed_reader(terminal):
    broken = threading.Event()
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as gone:
        view = make_view(gone, gone, Filters(), broken.set)
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
from dtrain.runs.events import Finished
from dtrain_cli.views import Filters, make_view
view = make_view(sys.stdout, sys.stderr, Filters(), lambda: None)
view.notice("going on")
view.on_event(Finished(Report(ExitCode.OK, "done", seconds=1, logs="")))
assert view.wait(600)
sys.exit("rich" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert b"dtrain: going on" in run.stderr


def test_the_last_column_is_not_erased():
    # After a full line, the cursor of a real terminal stays on the last character.
    full, short = Text("─" * 10), Text("short")
    drawn = frame([full, short], 10, color=False)
    assert f"{full.plain}\x1b[2;1H" in drawn
    assert "short\x1b[K" in drawn


def test_a_line_of_one_style_is_styled():
    drawn = frame([Text("hung", "white on red"), Text.assemble(("slow", "bold"))], 10, color=True)
    assert "\x1b[37;41mhung\x1b[0m" in drawn
    assert "\x1b[1mslow\x1b[0m" in drawn

"""A reader that closes the pipe is reported once, and not on the terminal."""

import subprocess
import sys

from support.limits import HANG

RUN = """
import os, sys, threading
from pathlib import Path
from dtrain.failures.cause import Report
from dtrain.diagnostics import ExitCode
from dtrain.runs.events import Finished
from dtrain_cli.views import Filters, make_view
from support.runs import Workers

workers = Workers(Path(sys.argv[1]))
asked = []
stop = threading.Event()
def broken():
    asked.append(1)
    stop.set()
view = make_view(sys.stdout, sys.stderr, Filters(), broken, json="json" in sys.argv)
stream = workers.stream("node0", 0)
for batch in range(100_000):
    view.output(stream, workers.write(stream, b"some text\\n" * 1000))
    if stop.wait(0.01):
        break
else:
    os._exit(3)
print("left in Python's own buffer")
for batch in range(100):
    view.output(stream, workers.write(stream, b"some text\\n" * 1000))
view.on_event(Finished(Report(ExitCode.INTERRUPTED, "its output was closed", seconds=1)))
assert view.wait(600)
sys.exit(len(asked))
"""


def through_head(tmp_path, pythonpath, *arguments):
    command = [sys.executable, "-c", RUN, str(tmp_path), *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": pythonpath, "PATH": "/usr/bin:/bin"},
    ) as run:
        head = subprocess.run(["head", "-1"], stdin=run.stdout, capture_output=True, check=True)
        run.stdout.close()
        _, err = run.communicate(timeout=HANG)
    return run.returncode, head.stdout, err.decode()


def test_head(tmp_path):
    code, out, err = through_head(tmp_path, ":".join(sys.path))
    assert code == 1
    assert out == b"[node0 0] some text\n"
    assert err == "dtrain: stopped after 1.0 s: its output was closed\n"


def test_head_of_json_lines(tmp_path):
    code, out, err = through_head(tmp_path, ":".join(sys.path), "json")
    assert (code, err) == (1, "")
    assert b'"event": "line"' in out


def test_both_closed_at_once(tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
    ) as run:
        run.stdout.read(10)
        run.stdout.close()
        assert run.wait(HANG) == 1


def test_a_full_disk_is_reported_and_the_run_continues(tmp_path):
    code = RUN.replace("range(100_000)", "range(10)").replace("os._exit(3)", "pass")
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [sys.executable, "-c", code.replace("print(", "str("), str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
            check=False,
            timeout=HANG,
        )
    assert run.returncode == 0
    assert run.stderr.decode().splitlines() == [
        "dtrain: output is no longer shown: No space left on device",
        "dtrain: stopped after 1.0 s: its output was closed",
    ]


def test_closed_from_the_start(tmp_path):
    code = RUN.replace("range(100_000)", "range(10)").replace("os._exit(3)", "pass")
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        check=False,
        timeout=HANG,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == b"dtrain: stopped after 1.0 s: its output was closed\n"

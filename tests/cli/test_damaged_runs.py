"""Every command reports a damaged run folder, and other runs are unaffected."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.runs.events import HostState
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import encode
from dtrain_cli import app
from support.stored import END, make_run

Dtrain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dtrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Dtrain:
    """Runs the command line in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr("sys.argv", ["dtrain", *argv])
        code = int(app.run())
        out, err = capfd.readouterr()
        assert code != 70, (argv, err, [p.read_text() for p in tmp_path.glob("dtrain-fault-*")])
        return code, out, err

    return run


def record(**changes: Any) -> Callable[[RunFolder], None]:
    """Change keys of run.json; ``request__text`` is a key of ``request``."""

    def damage(folder: RunFolder) -> None:
        path = folder.path / "run.json"
        body = json.loads(path.read_text())
        for key, value in changes.items():
            *into, last = key.split("__")
            (body[into[0]] if into else body)[last] = value
        path.write_text(json.dumps(body))

    return damage


def replaced(name: str, by: Callable[[Path], object]) -> Callable[[RunFolder], None]:
    def damage(folder: RunFolder) -> None:
        path = folder.path / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        by(path)

    return damage


def text(content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


DEEP = '{"schema": 1, "run": ' + "[" * 100_000 + "]" * 100_000 + "}"
UNREADABLE = {
    "empty": replaced("run.json", text("")),
    "binary": replaced("run.json", text(b"\x80\xff\0" * 1000)),
    "deep": replaced("run.json", text(DEEP)),
    "list": replaced("run.json", text("[]")),
    "null": replaced("run.json", text("null")),
    "huge": replaced("run.json", lambda path: path.open("wb").truncate(1 << 33)),
    "fifo": replaced("run.json", os.mkfifo),
    "folder": replaced("run.json", Path.mkdir),
    "link": replaced("run.json", lambda path: path.symlink_to("/dev/zero")),
    "gone": replaced("run.json", lambda path: None),
    "schema": record(schema=99),
    "no schema": record(schema=None),
    "run": record(run="../other"),
    "run type": record(run=["x"]),
    "port": record(port=10**30),
    "port text": record(port="29500"),
    "started": record(started=float("inf")),
    "started NaN": record(started=float("nan")),
    "attempt": record(attempt=10**18),
    "attempt zero": record(attempt=0),
    "replaced": record(replaced=["n1"]),
    "replaced circle": record(replaced={"n1": "s1", "s1": "n1"}),
    "dropped": record(dropped={"n1": "two"}),
    "leftovers": record(leftovers=[["n1"]]),
    "request": record(request=None),
    "text": record(request__text=5),
    "text surrogate": record(request__text="\ud800"),
    "text damaged": record(request__text="cluster: ["),
    "text empty": record(request__text=""),
    "too few hosts": record(dropped={"n1": 1, "s1": 1, "n2": 1, "n3": 1}, replaced={}),
    "args": record(request__args={"a": 1}),
    "env": record(request__env={"A": 1}),
    "check": record(request__check="yes"),
    "journal fifo": replaced("journal.jsonl", os.mkfifo),
    "journal folder": replaced("journal.jsonl", Path.mkdir),
    "journal link": replaced("journal.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "writable by others": lambda folder: folder.path.chmod(0o777),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_run_is_one_row(name: str, dtrain: Dtrain, tmp_path: Path) -> None:
    make_run("good-run")
    folder = make_run("bad-run")
    UNREADABLE[name](folder)
    for argv in (["ps"], ["ps", "--all"]):
        code, out, err = dtrain(*argv)
        assert (code, err) == (0, "")
        rows = {line.split()[0]: line for line in out.splitlines()[1:] if line}
        assert rows["good-run"].split()[1] == "failed"
        assert rows["bad-run"].split()[1] == "unreadable"
        assert str(folder.path) in rows["bad-run"] or "hosts" in rows["bad-run"], rows
    code, out, _ = dtrain("ps", "--all", "--json")
    states = {run["run"]: run["state"] for run in json.loads(out)["runs"]}
    assert (code, states) == (0, {"good-run": "failed", "bad-run": "unreadable"})
    for argv in (["ps", "bad"], ["ps", "bad", "--json"], ["logs", "bad"], ["report", "bad"]):
        if argv[0] != "logs" or "journal" not in name:
            code, out, err = dtrain(*argv)
            assert code in (2, 3), (argv, out)
            assert err.startswith("error: ") or ": error: " in err
    for verb in ("attach", "stop"):
        assert dtrain(verb, "bad")[0] in (2, 3)


@pytest.mark.parametrize("lines", [1, 2])
def test_damaged_lines_of_the_journal_are_counted(dtrain: Dtrain, lines: int) -> None:
    make_run("good-run")
    folder = make_run("bad-run")
    with folder.journal.open("ab") as file:
        file.write(b'{"schema": 1, "time": 1, "event": []}\n' * lines)
    notice = f"{lines} journal line{'s' * (lines > 1)} could not be read"
    assert f"bad-run: {notice}\n" in dtrain("ps")[1]
    assert f"journal  {notice}\n" in dtrain("ps", "bad")[1]
    (run,) = json.loads(dtrain("ps", "bad", "--json")[1])["runs"]
    assert (run["state"], run["unreadable_lines"]) == ("failed", lines)


def test_an_ended_run_has_final_host_states(dtrain: Dtrain) -> None:
    folder = make_run("old-run")
    states = {"n1": "stopping", "s1": "ended", "n3": "lost"}
    lines = [encode(1e9, HostState(host, state)) for host, state in states.items()]
    folder.journal.write_bytes(b"".join([*lines, encode(1e9, END)]))
    (run,) = json.loads(dtrain("ps", "old", "--json")[1])["runs"]
    found = {host: one["state"] for host, one in run["hosts"].items()}
    assert found == {"n1": "unknown", "s1": "ended", "n3": "lost"}


HARMLESS = {
    "logs gone": replaced("logs", lambda path: None),
    "logs a file": replaced("logs", text("x")),
    "logs a fifo": replaced("logs", os.mkfifo),
    "a stream that is a fifo": replaced("logs/n1/worker-0.out", os.mkfifo),
    "a stream that is a folder": replaced("logs/n1/worker-0.out", Path.mkdir),
    "a stream that is a link": replaced(
        "logs/n1/worker-0.out", lambda path: path.symlink_to("/dev/zero")
    ),
    "odd names": lambda folder: [
        (folder.path / "logs" / name).mkdir() for name in ("\n", "\x1b[31m", "-", "n9")
    ],
    "launcher fifo": replaced("launcher", os.mkfifo),
    "launcher folder": replaced("launcher", Path.mkdir),
    "launcher text": replaced("launcher", text("9" * 5000)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_other_files_have_no_effect(name: str, dtrain: Dtrain) -> None:
    folder = make_run("bad-run")
    HARMLESS[name](folder)  # type: ignore[operator]
    assert dtrain("ps", "bad")[0] == 0
    code, out, _ = dtrain("logs", "bad")
    assert code == 0
    assert "a line in logs-2" in out
    assert dtrain("attach", "bad")[0] == 1
    assert dtrain("stop", "bad")[0] == 2


def test_folders_that_are_not_runs_are_ignored(dtrain: Dtrain, tmp_path: Path) -> None:
    make_run("good-run")
    runs = tmp_path / "home" / "runs"
    for name in (b"\xff\xfe", b"\n", b"-x", b"a b", b".hidden"):
        os.mkdir(os.path.join(os.fsencode(runs), name))
    (runs / "a-file").write_text("")
    (runs / "broken").symlink_to("/nowhere")
    os.mkfifo(runs / "fifo")
    code, out, _ = dtrain("ps", "--all")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["RUN", "good-run"]


LONG = "9" * 10_000


@pytest.mark.parametrize(
    "argv",
    [
        ["logs", "run-1", "--rank", LONG],
        ["logs", "run-1", "--rank", f"0-{LONG}"],
        ["logs", "run-1", "--rank", "٣"],
        ["logs", "run-1", "--rank", "²"],
        ["logs", "run-1", "--rank", "1-0"],
        ["logs", "run-1", "--rank", "\n\x1b[31m"],
        ["logs", "run-1", "--rank", "0-" * 5000],
        ["logs", "run-1", "--host", LONG],
        ["logs", "run-1", "--host", f"n[0-{LONG}]"],
        ["logs", "run-1", "--host", "n[1-99999999999]"],
        ["logs", "run-1", "--host", "[" * 10_000],
        ["logs", "run-1", "--host", "\udcff\n\x1b[31m"],
        ["logs", "run-1", "--since", LONG],
        ["logs", "run-1", "--since", "1e400"],
        ["logs", "run-1", "--since", "-1s"],
        ["logs", "run-1", "--since", "\udcff\n"],
        ["logs", "run-1", "--since", "1s" * 5000 + "!"],
        ["logs", "run-1", "--tail", "-1"],
        *[[verb, name] for verb in ("ps", "logs", "attach", "stop")
          for name in (LONG, "\n\x1b[31m", "\udcff", "\0", "../x", "", "-")],
    ],
    ids=lambda argv: ascii(" ".join(argv))[:40],
)  # fmt: skip
def test_wrong_arguments_are_usage_errors(argv: list[str], dtrain: Dtrain) -> None:
    make_run("run-1")
    code, out, err = dtrain(*argv)
    assert (code, out) == (2, "")
    assert len(err) < 1000
    assert err.replace("\n", "").isprintable()

"""The command line: help, usage errors and exit codes, without tracebacks."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from dtrain_cli import app
from support.launching import completed

JOB = {"framework": "torch", "script": "train.py"}


def dtrain(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return completed(*argv, environment={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **environment})


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster": {"hosts": ["a", "b"], "gpus": 2}, "job": JOB}))
    return path


def test_help_lists_every_command_and_exit_code() -> None:
    done = dtrain("--help")
    assert done.returncode == 0
    for word in ("launch", "schema", "Exit codes", "130"):
        assert word in done.stdout


@pytest.mark.parametrize("verb", app.VERBS)
def test_the_summary_of_a_command_is_the_first_line_of_its_help(verb: str) -> None:
    function = getattr(import_module(f"dtrain_cli.commands.{verb}"), verb)
    assert function.__doc__.splitlines()[0] == app.VERBS[verb]


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from dtrain_cli import app\n"
        "try: app.app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'paramiko', 'yaml', 'rich', 'torch', 'dtrain.spec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n"), done.stdout


def test_the_script_is_ready_for_ctrl_c_before_it_imports() -> None:
    code = (
        "import sys; from dtrain_cli import __main__\n"
        "print(sorted({'typing', 'typer', 'dtrain_cli.app'} & set(sys.modules)))"
    )
    # Without site, whose files may import typing as well.
    folder = str(Path(app.__file__).parents[1])
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(argv, env={"PYTHONPATH": folder}, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_options_are_read_without_pydantic(cluster: Path) -> None:
    code = (
        "import sys; from dtrain_cli import app\n"
        "try: app.app(['launch', '--dry-run', sys.argv[1]])\n"
        "finally: print('pydantic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(cluster)], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("False\n"), done.stdout + done.stderr


def test_a_current_folder_that_was_removed_is_no_bug(cluster: Path) -> None:
    (cluster.parent / "gone").mkdir()
    program = Path(sys.executable).with_name("dtrain")
    line = f'cd gone && rmdir ../gone && exec "{program}" launch --dry-run ../cluster.yaml'
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=cluster.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the current folder was removed\nhint: cd to another folder\n"


def test_ctrl_c_while_python_still_imports(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "dtrain_cli", "--version"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_version() -> None:
    assert dtrain("--version").stdout.startswith("dtrain ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["launch"], "FILE"),
        (["launch", "nowhere.yaml"], "nowhere.yaml"),
        (["launch", "/"], "folder"),
        (["fly"], "there is no command 'fly'"),
        (["lanch"], "did you mean 'launch'?"),
        (["status"], "did you mean 'ps'?"),
        (["export"], "did you mean 'launch --dry-run'?"),
        (["launch", "{cluster}x"], "did you mean"),
        (["launch", "{cluster}", "--lr", "1"], "your own program go after --"),
        (["launch", "{cluster}", "--fly"], "--fly"),
        (["launch", "{cluster}", "--num_gpus", "2"], "`--set cluster.gpus=N`"),
        (["check", "{cluster}", "--include", "a"], "`--set cluster.hosts=HOSTS`"),
        (["launch", "{cluster}", "{cluster}", "--", "1"], "one cluster file"),
        (["launch", "{cluster}", "--output", "x"], "--dry-run"),
        (["launch", "{cluster}", "--rank", "0,x"], "--rank"),
        (["launch", "{cluster}", "--rank", "9"], "0-3"),
        (["launch", "{cluster}", "--rank"], "`dtrain launch --help`"),
        (["launch", "{cluster}", "--dry-run", "--host", "a"], "--output DIR"),
        (["launch", "{cluster}", "--host", "a[0-"], "--host"),
        (["launch", "{cluster}", "--host", "c"], "a,b"),
    ],
)
def test_usage_errors(cluster: Path, argv: list[str], message: str) -> None:
    done = dtrain(*(word.format(cluster=cluster) for word in argv))
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_an_invalid_file_is_reported_with_the_position(cluster: Path) -> None:
    cluster.write_text("cluster:\n  hosts: [a]\n  gpu: h100\n  gpuz: 8\njob: {framework: torch}\n")
    done = dtrain("launch", str(cluster))
    assert done.returncode == 2
    assert f"{cluster}:4:3" in done.stderr
    assert "gpus" in done.stderr
    assert done.stderr.endswith(f"\n\n3 problems in {cluster}\n")


def test_settings_change_the_file_for_one_command(cluster: Path) -> None:
    settings = ("--set", "cluster.hosts=[c]", "--set", "job.args=[--epochs, 3]")
    done = dtrain("launch", str(cluster), *settings, "--dry-run", "--json", "--", "-v")
    (host,) = json.loads(done.stdout)["hosts"]
    assert host["host"] == "c"
    assert host["processes"][0]["argv"] == ["python3", "train.py", "--epochs", "3", "-v"]
    for words in (("check", str(cluster)), ("exec", str(cluster), "ls")):
        done = dtrain(*words, "--set", "job.grac=1m")
        assert done.returncode == 2
        assert "error: --set:1:5: unknown key 'grac' in job" in done.stderr


def test_a_missing_secret(cluster: Path) -> None:
    cluster.write_text(
        yaml.safe_dump(
            {"cluster": {"hosts": ["a"], "gpus": 2}, "job": {**JOB, "secrets": ["WANDB_API_KEY"]}}
        )
    )
    done = dtrain("launch", str(cluster))
    assert done.returncode == 2
    assert "export WANDB_API_KEY" in done.stderr
    assert dtrain("launch", str(cluster), "--dry-run").returncode == 0


def test_arguments_after_two_dashes_reach_the_script(cluster: Path) -> None:
    done = dtrain("launch", str(cluster), "--dry-run", "--json", "--", "--lr", "1e-5", "--json")
    argv = json.loads(done.stdout)["hosts"][0]["processes"][0]["argv"]
    assert argv == ["python3", "train.py", "--lr", "1e-5", "--json"]


def test_an_unrelated_folder_is_not_changed(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    done = dtrain("launch", str(cluster), "--dry-run", "--output", str(tmp_path / "mine"))
    assert done.returncode == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_an_internal_error_is_written_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("a fault for this test \udcff")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(app, "app", fail)
    assert app.run() == 70
    message = capsys.readouterr().err
    assert "Traceback" not in message
    (report,) = tmp_path.iterdir()
    assert str(report) in message
    assert "a fault for this test" in report.read_text()
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    assert app.run() == 70
    message = capsys.readouterr().err
    assert "a fault for this test" in message
    assert "(no file has the details: No such file or directory)" in message


@pytest.mark.parametrize(
    ("error", "words", "limit"),
    [
        (RuntimeError("can't start new thread"), "dtrain start no more threads", "ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files"), "dtrain open no more files", "ulimit -n"),
        (OSError(errno.ENFILE, "File table overflow"), "its processes open", "sysctl fs.file-max"),
    ],
    ids=["threads", "files", "files of the machine"],
)
def test_a_limit_of_this_machine_is_no_bug(
    error: Exception,
    words: str,
    limit: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    assert app.run() == 3
    message = capsys.readouterr().err
    assert message.startswith(f"error: this machine lets {words}")
    assert "\nhint: raise the limit" in message
    assert f"`{limit}`" in message


def test_a_thread_that_computes_a_cipher_does_not_abort_the_end() -> None:
    """Python ends it as soon as it gets back from the Python code that the Rust code calls."""
    code = """\
import sys, threading, time
from cryptography.hazmat.primitives import hashes
from dtrain_cli.app import main
within = threading.Event()
class Slow(hashes.SHA256):
    @property
    def name(self):
        within.set()
        while True:
            time.sleep(0.001)
threading.Thread(target=hashes.Hash, args=(Slow(),), daemon=True).start()
within.wait()
sys.argv = ["dtrain", "--version"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dtrain ")

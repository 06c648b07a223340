"""If stdout is on a full disk, every command reports it and exits with 3. If its reader is gone, a
command exits with 141."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
from array import array
from pathlib import Path

import pytest

from dtrain_cli.commands.schema import schema_json
from support import warm
from support.limits import HANG, until
from support.stored import FILE, make_run

VERBS = [
    "--help",
    "--version",
    "ps",
    "ps --all --json",
    "ps run-1",
    "logs run-1",
    "report run-1",
    "report run-1 --json",
    "logs run-1 --json",
    "logs --help",
    "schema",
    "plan --model-size 1B --gpus 8",
    "plan --model-size 1B --gpus 8 --json",
    "launch cluster.yaml --dry-run",
    "launch cluster.yaml --dry-run --json",
    "check cluster.yaml",
    "init new.yaml --hosts a --framework torch --script t.py --no-probe",
]


@pytest.mark.parametrize("verb", VERBS)
def test_output_that_cannot_be_written(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    make_run()
    (tmp_path / "cluster.yaml").write_text(FILE)
    (tmp_path / "train.py").touch()
    # The real torch takes seconds to import.
    fake = Path(__file__).parents[1] / "checks" / "fakes" / "torch-2.13.0"
    environment = {**os.environ, "PYTHONPATH": str(fake)}
    with Path("/dev/full").open("wb") as full:
        process = warm.dtrain(
            *verb.split(),
            environment=environment,
            folder=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
        )
        _, stderr = process.communicate(HANG)
    assert process.returncode == 3, stderr
    assert "error: cannot write to standard output: No space left on device\n" in stderr
    assert "Exception ignored" not in stderr


@pytest.mark.parametrize("verb", ["--help", "ps", "logs run-1", "logs run-1 --json", "schema"])
def test_output_whose_reader_is_gone(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    make_run()
    reader, writer = os.pipe()
    os.close(reader)
    process = warm.dtrain(
        *verb.split(), environment=os.environ, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    _, stderr = process.communicate(HANG)
    assert process.returncode == 141, stderr
    assert "rror" not in stderr


@pytest.mark.parametrize("verb", ["--help", "logs run-1"])
def test_output_on_a_disk_that_fails(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO, which also means that a terminal was closed."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    make_run()
    # A regular file that refuses each write at its start: no process has memory there.
    with Path(f"/proc/{os.getpid()}/mem").open("wb", buffering=0) as failing:
        process = warm.dtrain(
            *verb.split(), environment=os.environ, stdout=failing, stderr=subprocess.PIPE
        )
        _, stderr = process.communicate(HANG)
    assert process.returncode == 3, stderr
    assert "error: cannot write to standard output: Input/output error\n" in stderr


def test_a_new_process_whose_output_cannot_be_written() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dtrain_cli", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 3, done
    assert "error: cannot write to standard output: No space left on device\n" in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["plain", "json"])
def test_a_launch_whose_output_cannot_be_written(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('a line')\n")
    (tmp_path / "cluster.yaml").write_text(
        "cluster: {hosts: [a], transport: local, gpus: 0, slots: 1}\n"
        "job: {framework: torch, script: train.py}\n"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dtrain_cli", "launch", "cluster.yaml", "--no-check", *options],
            env={**os.environ, "DTRAIN_HOME": str(tmp_path / "home")},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 3, done
    assert "error: cannot write to standard output" in done.stderr


@pytest.mark.parametrize("argv", [["ps", "nowhere"], ["--fly"]])
def test_an_error_that_cannot_be_written_keeps_its_exit_code(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("wb") as full, open(writer, "wb") as closed:
        for output in (full, closed):
            process = warm.dtrain(*argv, environment=os.environ, stdout=output, stderr=output)
            process.communicate(HANG)
            assert process.returncode == 2


def test_a_pipe_that_the_parent_process_made_non_blocking() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain_cli", "schema"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    waiting = array("i", [0])
    until(lambda: not fcntl.ioctl(reader, termios.FIONREAD, waiting) and waiting[0] == 4096)
    with os.fdopen(reader, "rb") as pipe:
        shown = pipe.read()
    _, stderr = process.communicate(HANG)
    assert (process.returncode, stderr) == (0, "")
    assert shown.decode() == schema_json()

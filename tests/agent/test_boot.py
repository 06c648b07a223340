"""The agent gets going wherever there is a Python, or says clearly why it does not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib import resources

import pytest

from dtrain.node import boot, protocol
from dtrain.node.agent import wire
from dtrain.node.programs import MODULES, program
from support.node import Node, pythons

SHELLS = list(filter(None, map(shutil.which, ("sh", "bash", "dash", "zsh", "fish", "csh"))))


@pytest.mark.parametrize("name", MODULES)
def test_a_program_is_python_3_8(name: str) -> None:
    ast.parse(program(name), feature_version=(3, 8))


@pytest.mark.parametrize("name", MODULES)
def test_the_modules_of_a_program_can_stand_one_after_the_other(name: str) -> None:
    defined: dict[str, str] = {}
    for module in MODULES[name]:
        place = f"dtrain.node.{module}"
        file = resources.files("dtrain.node").joinpath(module.replace(".", "/") + ".py")
        text = file.read_text("utf-8")
        for piece in ast.parse(text).body:
            match piece:
                case ast.ImportFrom(module=str(origin), names=names) if origin.startswith("dtrain"):
                    assert {defined[alias.name] for alias in names} == {origin}
                case ast.FunctionDef(name=own) | ast.ClassDef(name=own):
                    assert defined.setdefault(own, place) == place
                case ast.Assign() | ast.AnnAssign():
                    for found in ast.walk(piece):
                        if isinstance(found, ast.Name) and isinstance(found.ctx, ast.Store):
                            assert found.id == "TYPE_CHECKING" or found.id not in defined
                            defined[found.id] = place
    assert not re.search(rb"^\s*from dtrain", program(name), re.MULTILINE)


@pytest.mark.parametrize("name", MODULES)
def test_a_program_needs_the_standard_library_alone(name: str) -> None:
    tree = ast.parse(program(name))
    names = set()
    for piece in ast.walk(tree):
        if isinstance(piece, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in piece.names}
        elif isinstance(piece, ast.ImportFrom):
            names.add(str(piece.module).partition(".")[0])
    assert names <= set(sys.stdlib_module_names)


def test_both_ends_speak_the_same_protocol() -> None:
    assert wire.VERSION == protocol.VERSION
    assert wire.PREAMBLE == protocol.PREAMBLE
    assert wire.HEADER.format == protocol.HEADER.format
    assert (wire.MESSAGE, wire.DATA) == (protocol.MESSAGE, protocol.DATA)
    assert wire.CHUNK <= wire.MAX_PAYLOAD == protocol.MAX_PAYLOAD


def test_no_shell_finds_anything_of_its_own_in_the_command() -> None:
    assert not set(boot.BOOT) & set("'\\!\n")
    assert len(boot.BOOT) < 1000


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_starts_it(host: Node, shell: str) -> None:
    run = "it's $(touch oops) a run"
    (host.workdir / "my python").symlink_to(host.python)
    command = boot.boot_command("~/my python", run)
    done = subprocess.run(
        [shell, "-c", command],
        input=b"%d\n" % len(program("agent")) + program("agent"),
        capture_output=True,
        env={"HOME": str(host.workdir), "PATH": "/usr/bin:/bin"},
        cwd=host.workdir,
        check=True,
    )
    decoder = protocol.FrameDecoder()
    (hello,) = decoder.feed(done.stdout)
    assert isinstance(hello, protocol.Message)
    assert hello.body["type"] == "hello"
    assert done.stderr == b""
    assert not (host.workdir / "oops").exists()


def test_a_python_works_or_is_too_old(host: Node) -> None:
    """Every old one, and the ends of the range of those that will do."""
    here = pythons()
    able = sorted(version for version in here if version >= (3, 8))
    for version in sorted(set(here) - set(able)):
        host.python = here[version]
        one = host.agent()
        assert one.wait() == boot.TOO_OLD
        assert one.stderr == b"dtrain: python %d.%d is too old\n" % version
    for version in able[:1] + able[-1:]:
        host.python = here[version]
        one = host.start(host.shell("echo hello"), run=f"run{version}")
        assert one.wait() == 0
        assert one.text("worker-0.out") == "hello\n"
        assert one.stderr == b""


def test_modules_in_the_home_folder_are_not_taken_for_pythons_own(host: Node) -> None:
    for name in ("json", "socket", "os", "signal", "marshal", "sitecustomize"):
        (host.workdir / f"{name}.py").write_text("raise SystemExit('imported')")
    source = program("agent")
    done = subprocess.run(
        ["sh", "-c", boot.boot_command(host.python, "run")],
        input=b"%d\n" % len(source) + source,
        capture_output=True,
        cwd=host.workdir,
        env={"PYTHONPATH": str(host.workdir), "PYTHONSTARTUP": str(host.workdir / "os.py")},
        check=True,
    )
    assert protocol.PREAMBLE in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize("cut", [0, 3, 1000])
def test_a_source_that_does_not_arrive_whole_is_not_executed(host: Node, cut: int) -> None:
    source = program("agent")
    done = subprocess.run(
        ["sh", "-c", boot.boot_command(host.python, "run")],
        input=(b"%d\n" % len(source) + source)[:cut],
        capture_output=True,
        check=False,
    )
    assert done.stdout == b""


def test_it_is_ready_in_a_moment(host: Node) -> None:
    """As fast as a few starts of Python, whatever else the machine does."""
    import time

    ready, start = [], []
    for n in range(5):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", "import subprocess, json"], check=True)
        start.append(time.monotonic() - begin)
        begin = time.monotonic()
        host.launch(host.shell("exit"), run=f"run{n}").expect("prepared")
        ready.append(time.monotonic() - begin)
    assert min(ready) < 20 * min(start)

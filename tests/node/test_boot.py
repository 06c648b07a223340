"""The agent starts with every supported Python, and reports one that is too old."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.node import protocol
from dtrain.node.agent.wire import PREAMBLE
from dtrain.node.boot import NO_INPUT, REPLACED, TOO_OLD, boot_text, framed, pack
from dtrain.node.programs import PROGRAMS, boot_command, bundled, modules, program
from support.node import Node, pythons

SHELLS = list(filter(None, map(shutil.which, ("sh", "bash", "dash", "zsh", "fish", "csh"))))


SHIPPED = {name: text for program in PROGRAMS for name, text in modules(program).items()}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_modules_are_python_3_8_and_need_only_the_standard_library(name: str) -> None:
    tree = ast.parse(SHIPPED[name], feature_version=(3, 8))
    for piece in at_run_time(tree):
        if isinstance(piece, ast.Import):
            for alias in piece.names:
                assert alias.name.partition(".")[0] in sys.stdlib_module_names
        elif isinstance(piece, ast.ImportFrom):
            module = str(piece.module)
            known = module in SHIPPED or module.partition(".")[0] in sys.stdlib_module_names
            # Names of a package would be in its `__init__`, which is not shipped.
            assert known and piece.level == 0


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``tree``, without those that only a type checker reads."""
    for piece in ast.iter_child_nodes(tree):
        if isinstance(piece, ast.If) and ast.unparse(piece.test) == "TYPE_CHECKING":
            piece = ast.Module(piece.orelse, [])
        yield piece
        yield from at_run_time(piece)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_contains_each_module_that_it_imports(host: Node, name: str) -> None:
    """With the oldest Python, which has no dtrain installed."""
    imports = "".join(f"importlib.import_module({module!r})\n" for module in modules(name))
    text = imports + "def main(stream, importer): print('imported', stream.read())"
    source = pack("test", {**modules(name), "test": "import importlib\n" + text})
    done = run_boot(host, framed(source) + b"and the rest")
    assert (done.stdout, done.stderr) == (b"imported b'and the rest'\n", b"")


def test_a_traceback_names_the_file_and_the_line(host: Node) -> None:
    text = "def main(stream, importer):\n    raise RuntimeError('oh')"
    source = pack("dtrain.node.bad", {**modules("relay"), "dtrain.node.bad": text})
    done = run_boot(host, framed(source), check=False)
    assert done.returncode == 1
    assert b'File "dtrain/node/bad.py", line 2, in main\n' in done.stderr


def test_nothing_is_left_on_the_disk(host: Node) -> None:
    agent = host.start(host.shell("exit"))
    assert agent.wait() == 0
    assert not [path for path in host.workdir.rglob("*") if "__pycache__" in path.parts]


def run_boot(host: Node, data: bytes, *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    command = ["sh", "-c", boot_command(host.python, "run")]
    return subprocess.run(command, input=data, capture_output=True, cwd=host.workdir, check=check)


@pytest.mark.parametrize("script", ["read line", "head -c 100 >&2", "exec <&-", "exec >&-"])
def test_a_login_script_that_takes_the_input_is_named(host: Node, script: str) -> None:
    command = ["bash", "-c", f"{script}; {boot_command(host.python, 'run')}"]
    done = subprocess.run(command, input=bundled("agent"), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.endswith(f"{NO_INPUT}\n".encode())


# fish reads the whole input before it executes anything, and finds that it is no script.
@pytest.mark.parametrize("shell", [shell for shell in SHELLS if not shell.endswith("/fish")])
def test_a_shell_that_reads_the_program_executes_none_of_it(shell: str, tmp_path: Path) -> None:
    """A login script with ``exec zsh`` gives a shell the input, and no command."""
    done = subprocess.run(
        [shell], input=bundled("agent"), capture_output=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (REPLACED, b"", b"")


def test_a_shell_without_comments_executes_nothing_either(tmp_path: Path) -> None:
    """As ``zsh -i`` by default."""
    subprocess.run(
        ["bash", "--norc", "+O", "interactive_comments", "-i"],
        input=framed(b"touch ran\n"),
        capture_output=True,
        cwd=tmp_path,
        start_new_session=True,
        check=False,
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command_has_no_characters_that_shells_interpret() -> None:
    assert not set(boot_text()) & set("'\\!\n")
    assert len(boot_text()) < 1000


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_starts_the_agent(host: Node, shell: str) -> None:
    run = "it's $(touch oops) a run"
    (host.workdir / "my python").symlink_to(host.python)
    command = boot_command("~/my python", run)
    done = subprocess.run(
        [shell, "-c", command],
        input=framed(program("agent")),
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
    """Every old version, and the oldest and newest supported version."""
    here = pythons()
    able = sorted(version for version in here if version >= (3, 8))
    for version in sorted(set(here) - set(able)):
        host.python = here[version]
        one = host.agent()
        assert one.wait() == TOO_OLD
        assert one.stderr == b"dtrain: python %d.%d is too old\n" % version
    for version in able[:1] + able[-1:]:
        host.python = here[version]
        one = host.start(host.shell("echo hello"), run=f"run{version}")
        assert one.wait() == 0
        assert one.text("worker-0.out") == "hello\n"
        assert one.stderr == b""


def test_modules_in_the_home_folder_do_not_shadow_the_standard_library(host: Node) -> None:
    for name in ("json", "socket", "os", "signal", "marshal", "sitecustomize"):
        (host.workdir / f"{name}.py").write_text("raise SystemExit('imported')")
    source = program("agent")
    done = subprocess.run(
        ["sh", "-c", boot_command(host.python, "run")],
        input=framed(source),
        capture_output=True,
        cwd=host.workdir,
        env={"PYTHONPATH": str(host.workdir), "PYTHONSTARTUP": str(host.workdir / "os.py")},
        check=True,
    )
    assert PREAMBLE in done.stdout
    assert done.stderr == b""


def test_compiled_code_runs_in_this_python_and_is_compiled_anew_in_another(host: Node) -> None:
    for python in (sys.executable, host.python):
        host.python = python
        assert PREAMBLE in run_boot(host, bundled("agent")).stdout


@pytest.mark.parametrize("cut", [0, 3, 1000, 50_000])
def test_an_incomplete_program_is_not_executed(host: Node, cut: int) -> None:
    done = subprocess.run(
        ["sh", "-c", boot_command(host.python, "run")],
        input=bundled("agent")[:cut],
        capture_output=True,
        check=False,
    )
    assert done.stdout == b""

"""The program that gathers facts never hangs, never raises, and leaves nothing behind."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from venv import EnvBuilder

import pytest

from dtrain.launchplan.build import build
from dtrain.messages.facts import read_gathered
from dtrain.node.agent import control
from dtrain.node.boot import framed
from dtrain.node.facts import storage
from dtrain.node.facts.containers import containers
from dtrain.node.interpreter import to_json
from dtrain.node.launchers import launcher_of
from dtrain.node.programs import bundled_text
from dtrain.session.facts.conversation import Conversation
from dtrain.spec.load import parse
from dtrain.transport.local import LocalTransport
from support.limits import HANG

Ask = Callable[..., dict[str, Any]]
INTERPRETER = bundled_text("interpreter")
FILE = "cluster: {hosts: [here], gpus: 0, transport: local}\njob: {framework: torch, script: a.py}"


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    with asking(tmp_path, sys.executable) as gather:
        yield gather


@contextlib.contextmanager
def asking(workdir: Path, python: str) -> Iterator[Ask]:
    """Gather some facts of this machine with the real program."""
    connection = LocalTransport().connect(build(parse(FILE, "cluster.yaml")).hosts[0].host)
    conversation = Conversation(
        build(parse(FILE, "cluster.yaml"), local_python=python).hosts[0], connection
    )
    conversation.begin([python])

    def gather(*probes: str, **request: Any) -> dict[str, Any]:
        order: Any = {
            "op": "gather",
            "host": "here",
            "token": "t",
            "probes": probes,
            "ports": [],
            "addresses": {"here": "127.0.0.1"},
            "folders": {},
            "own_folders": {},
            "draw": None,
            "container": None,
            "code": False,
            "script": None,
            "shell_script": None,
            "trust_group": None,
            "workdir": str(workdir),
            "environment": {},
            "setup": [],
            "python": python,
            "interpreter": {
                "code": INTERPRETER,
                "limit": HANG,
                "options": {"framework": "torch"},
            },
            **request,
        }
        found = conversation.ask(
            order, partial(read_gathered, ports=order["ports"], setup=order["setup"])
        )
        return dict(found["facts"])

    try:
        yield gather
    finally:
        conversation.close()
        connection.close()


def interpreter(limit: float, source: str = "") -> dict[str, Any]:
    code = base64.b64encode(framed(source.encode())).decode()
    return {"code": code, "limit": limit, "options": {"framework": "torch"}}


def test_a_setup_line_that_never_ends(ask: Ask) -> None:
    begun = time.monotonic()
    found = ask("interpreter", setup=["true", "sleep 1000"], interpreter=interpreter(5.0))
    assert time.monotonic() - begun < HANG
    assert found["interpreter"]["status"] is None
    assert found["interpreter"]["failed_setup"] == 2


def test_a_background_process_does_not_delay_the_answer(ask: Ask) -> None:
    begun = time.monotonic()
    found = ask("interpreter", setup=["sleep 1000 &"])
    assert time.monotonic() - begun < HANG
    assert found["interpreter"]["python"]


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/missing")


def test_without_a_home_folder_an_interpreter_works(no_home: None, ask: Ask) -> None:
    assert ask("interpreter", workdir="~")["interpreter"]["python"]


def test_an_interpreter_that_writes_nonsense(ask: Ask) -> None:
    source = "import os; os.write(int(os.environ['DTRAIN_REPORT_FD']), b'\\xff{not json\\n')"
    found = ask("interpreter", interpreter=interpreter(HANG, source))
    assert "python" not in found["interpreter"]
    assert found["interpreter"]["status"] == 0


def test_the_report_of_an_interpreter_is_json() -> None:
    value = {"é\n": [None, True, False, 0, -7], '"\\': {"\U0001f600": "\udcff"}, "": {}, "a": []}
    assert json.loads(to_json(value)) == value
    assert to_json(value).isascii()


def test_a_package_without_a_version_counts_as_installed(ask: Ask, tmp_path: Path) -> None:
    package = tmp_path / "frame"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    asked = {**interpreter(HANG), "code": INTERPRETER, "options": {"framework": "frame"}}
    there = ask("interpreter", environment={"PYTHONPATH": str(tmp_path)}, interpreter=asked)
    assert there["interpreter"]["framework"] == {"version": None}
    (package / "version.py").write_text("from . import gone\n__version__ = gone.computed()")
    there = ask("interpreter", environment={"PYTHONPATH": str(tmp_path)}, interpreter=asked)
    assert there["interpreter"]["framework"] == {"version": None}
    metadata = tmp_path / "frame_cpu-2.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: frame-cpu\nVersion: 2.1\n")
    there = ask("interpreter", environment={"PYTHONPATH": str(tmp_path)}, interpreter=asked)
    assert there["interpreter"]["framework"] == {"version": "2.1"}


def test_a_program_is_found_where_a_worker_finds_it(ask: Ask, tmp_path: Path) -> None:
    for name, mode in (("train", 0o755), ("text", 0o644)):
        (tmp_path / name).touch(mode)

    def found(program: str, setup: list[str]) -> bool:
        options = {"framework": "none", "program": program}
        asked = {**interpreter(HANG), "code": INTERPRETER, "options": options}
        answer = ask("interpreter", setup=setup, interpreter=asked)
        return bool(answer["interpreter"]["program_found"]["found"])

    path = [f"PATH={tmp_path}:$PATH"]
    assert found(Path(sys.executable).name, [])  # beside the job's Python
    assert [found(name, path) for name in ("train", "text", "none")] == [True, False, False]
    assert not found("train", [])
    assert [found(f"{tmp_path}/{name}", []) for name in ("train", "text")] == [True, False]


def test_the_version_of_torch_is_read_without_importing_it(ask: Ask, tmp_path: Path) -> None:
    package = tmp_path / "frame"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(
        "raise RuntimeError('imported')\n__all__ = ['__version__', 'cuda']\n"
        "__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    asked = {**interpreter(HANG), "code": INTERPRETER, "options": {"framework": "frame"}}
    there = ask("interpreter", environment={"PYTHONPATH": str(tmp_path)}, interpreter=asked)
    assert there["interpreter"]["framework"] == {"version": "2.8.0+cu128", "cuda": "12.8"}


@pytest.fixture
def pth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ask, Path]]:
    """Ask in a virtual environment, whose Python executes the lines of a file at its start."""
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "env"
    EnvBuilder(system_site_packages=True, symlinks=True).create(folder)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    with asking(tmp_path, str(folder / "bin" / "python")) as gather:
        yield gather, site_packages / "some.pth"


def in_a_copy(limit: float, framework: str = "torch", copy: bool = True) -> dict[str, Any]:
    options = {"framework": framework, "module": "job", "program": "python"}
    return {"code": INTERPRETER, "limit": limit, "options": options, "copy": copy}


STARTS = "import os, sys; print(sys.flags.no_site, file=open(os.environ['STARTS'], 'a'))\n"
"""Says whether this is a new Python (0) or a copy of the agent (1)."""


@pytest.mark.parametrize("framework", ["linked", "of_user", "in_folder", "missing"])
def test_a_copy_of_the_agent_finds_what_a_new_python_finds(
    pth: tuple[Ask, Path], tmp_path: Path, framework: str
) -> None:
    ask, file = pth
    file.write_text(f"print('hello')\n{tmp_path}/elsewhere\n{STARTS}")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    user = tmp_path / "home" / ".local" / "lib" / version / "site-packages"
    for place, name in (
        (tmp_path / "elsewhere", "linked"),
        (user, "of_user"),
        (tmp_path, "in_folder"),
    ):
        (place / name).mkdir(parents=True)
        (place / name / "version.py").write_text(f"__version__ = '1.2+{name}'")
    (tmp_path / "job.py").touch()
    environment = {"HOME": f"{tmp_path}/home", "STARTS": f"{tmp_path}/starts"}
    copied, new = (
        ask(
            "interpreter",
            environment=environment,
            interpreter=in_a_copy(HANG, framework, copy),
        )["interpreter"]
        for copy in (True, False)
    )
    assert copied == new
    there = {"missing": True} if framework == "missing" else {"version": f"1.2+{framework}"}
    assert copied["framework"] == there
    assert copied["module_found"] == copied["program_found"] == {"found": True}
    # Python executes the line twice.
    assert (tmp_path / "starts").read_text().split() == ["1", "1", "0", "0"]


@pytest.mark.parametrize(
    "request_",
    [
        {"environment": {"PYTHONPATH": "/x"}},
        {"environment": {"LD_LIBRARY_PATH": "/x"}},
        {"environment": {"PATH": "/usr/bin:/bin"}, "python": "python3"},
        {"setup": ["true"]},
        {"python": os.path.realpath(sys.executable)},
    ],
)
def test_only_a_python_that_starts_like_the_agent_needs_no_start(
    pth: tuple[Ask, Path], tmp_path: Path, request_: dict[str, Any]
) -> None:
    ask, file = pth
    file.write_text(STARTS)
    environment = {"STARTS": f"{tmp_path}/starts", **request_.get("environment", {})}
    found = ask(
        "interpreter",
        **{**request_, "environment": environment, "interpreter": in_a_copy(HANG)},
    )
    assert found["interpreter"]["python"]
    starts = tmp_path / "starts"
    assert not starts.exists() or set(starts.read_text().split()) == {"0"}


def test_a_copy_that_ends_early_makes_a_new_python_show_why(pth: tuple[Ask, Path]) -> None:
    ask, file = pth
    file.write_text("import os; os.write(2, b'no licence\\n'); os._exit(3)\n")
    found = ask("interpreter", interpreter=in_a_copy(HANG))["interpreter"]
    assert (found["status"], found["output"]) == (3, "no licence")


def test_a_copy_that_does_not_end(pth: tuple[Ask, Path]) -> None:
    ask, file = pth
    file.write_text("import time; time.sleep(1000)\n")
    assert ask("interpreter", interpreter=in_a_copy(0.5))["interpreter"] == {"status": None}


def test_a_copy_that_reads_its_input(pth: tuple[Ask, Path]) -> None:
    ask, site = pth
    site.write_text("import sys; sys.stdin.read()\n")
    assert ask("interpreter", interpreter=in_a_copy(HANG))["interpreter"]["status"] == 0


def test_a_copy_that_leaves_a_process_behind(pth: tuple[Ask, Path], tmp_path: Path) -> None:
    """It keeps the pipe to the agent open."""
    ask, file = pth
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    file.write_text(f"import os; os.fork() or (os.setsid(), open({str(gate)!r}), os._exit(0))\n")
    found = ask("interpreter", interpreter=in_a_copy(HANG))["interpreter"]
    os.close(os.open(gate, os.O_RDWR))  # lets the process end
    assert found["status"] == 0


def test_a_copy_keeps_nothing_open_but_its_report(pth: tuple[Ask, Path], tmp_path: Path) -> None:
    """A process that it leaves behind would keep the connection to the launcher open."""
    ask, file = pth
    path = "'/proc/self/fd/' + fd"
    each = f"for fd in os.listdir('/proc/self/fd') if os.path.exists({path})"
    say = f"print(*(os.readlink({path}) {each}), file=open('{tmp_path}/open', 'w'))"
    file.write_text(f"import os; {say}\n")
    assert ask("interpreter", interpreter=in_a_copy(HANG))["interpreter"]["status"] == 0
    links = (tmp_path / "open").read_text().split()
    assert links.count(os.devnull) >= 3
    assert [link.partition(":")[0] for link in links if link[0] != "/"] == ["pipe"]


def test_a_variable_of_the_host_that_only_a_new_python_obeys(
    pth: tuple[Ask, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sshd may set it, and the agent ignores it."""
    _, file = pth
    file.write_text(STARTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/elsewhere")
    (tmp_path / "elsewhere" / "job").mkdir(parents=True)
    with asking(tmp_path, f"{tmp_path}/env/bin/python") as ask:
        found = ask(
            "interpreter",
            environment={"STARTS": f"{tmp_path}/starts"},
            interpreter=in_a_copy(HANG),
        )["interpreter"]
    assert found["module_found"] == {"found": True}
    assert (tmp_path / "starts").read_text().split() == ["0", "0"]


def test_setup_can_change_the_environment_but_the_file_overrides_it(
    ask: Ask, tmp_path: Path
) -> None:
    say = (
        "import json, os; seen = {name: os.environ.get(name) for name in ('FROM_SETUP', 'BOTH')};"
        "text = json.dumps({'python': '3', 'executable': os.getcwd(), 'packages': seen});"
        "os.write(int(os.environ['DTRAIN_REPORT_FD']), text.encode() + b'\\n')"
    )
    found = ask(
        "interpreter",
        setup=["export FROM_SETUP='a b' BOTH=setup", "mkdir sub", "cd sub"],
        environment={"BOTH": "it's the file's\n"},
        interpreter=interpreter(HANG, say),
    )
    seen = {"FROM_SETUP": "a b", "BOTH": "it's the file's\n"}
    assert found["interpreter"]["packages"] == seen
    assert found["interpreter"]["executable"] == str(tmp_path / "sub")


def test_setup_finds_the_programs_beside_the_interpreter(ask: Ask, tmp_path: Path) -> None:
    python = tmp_path / "env" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    python.with_name("beside").write_text("#!/bin/sh\necho found >found\n")
    python.with_name("beside").chmod(0o755)
    ask("interpreter", setup=["beside"], python=str(python))
    assert (tmp_path / "found").read_text() == "found\n"


def test_setup_lines_are_on_no_command_line(ask: Ask, tmp_path: Path) -> None:
    """They may contain secrets, and every user of a host can list its processes."""
    ask("interpreter", setup=["tr '\\0' ' ' </proc/$$/cmdline >words # of s3cret"])
    words = (tmp_path / "words").read_text()
    assert words
    assert "s3cret" not in words


def test_output_of_setup_does_not_reach_the_answer(ask: Ask) -> None:
    found = ask("interpreter", setup=["echo hush"])
    assert found["interpreter"]["python"]
    assert "hush" not in json.dumps(found)


def test_a_probe_that_fails_is_a_fact(ask: Ask) -> None:
    found = ask("storage", "names", "machine", folders={"a": "x" * 5000}, addresses=None)
    assert found["machine"]["python"]
    assert "error" in found["names"]


def test_runs_with_a_supervisor_are_found_by_its_socket(ask: Ask) -> None:
    with socket.socket(socket.AF_UNIX) as supervisor, socket.socket(socket.AF_UNIX) as other:
        supervisor.bind(control.control_name("run-of-somebody", "node7"))
        other.bind(b"\0dtrain/no-run")
        found = ask("machine")["machine"]["runs"]
    assert "run-of-somebody" in found
    assert "no-run" not in found


@pytest.mark.parametrize("listens", [True, False])
def test_whether_other_ports_are_free(ask: Ask, listens: bool) -> None:
    with socket.socket() as taken, socket.socket() as next_one:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        if listens:
            taken.listen()
        with contextlib.suppress(OSError):  # Another process has it then.
            next_one.bind(("", port + 1))
        found = ask(ports=[port], draw=[port, port + 1, 1])["ports"][str(port)]
        assert not found["room"]
        assert ("not listening" in found["holder"]) is not listens
        next_one.close()
        assert ask(ports=[port], draw=[port, port + 200, 1])["ports"][str(port)]["room"]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_taken_port_and_its_owner(ask: Ask, family: socket.AddressFamily) -> None:
    with socket.socket(family) as taken:
        taken.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = ask(ports=[port])["ports"][str(port)]
    assert not found["free"]
    assert "python" in found["holder"] or "pytest" in found["holder"]


def test_names_that_are_no_names(ask: Ask) -> None:
    odd = {"a": "no.such.host.invalid", "b": "x" * 300, "c": "", "here": "127.0.0.1"}
    found = ask("names", addresses=odd)["names"]["hosts"]
    assert "error" in found["a"]
    assert "error" in found["b"]
    assert found["here"]["addresses"] == ("127.0.0.1",)


def test_nothing_runs_in_a_folder_that_another_user_can_change(ask: Ask, tmp_path: Path) -> None:
    """Python looks for modules in its working folder first."""
    workdir = tmp_path / "work"
    workdir.mkdir()
    (workdir / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    workdir.chmod(0o777)
    found = ask(
        "interpreter",
        "script",
        "storage",
        setup=[f"touch {tmp_path}/ran"],
        workdir=str(workdir),
        script="json.py",
        folders={"cluster.run_dir": str(tmp_path), "job.workdir": str(workdir)},
        own_folders={"cluster.run_dir": f"{workdir}/run/nodes"},
    )
    assert found["interpreter"]["unsafe"]
    assert not (tmp_path / "ran").exists()
    assert "every user can write to it (mode 0777)" in found["script"]["unsafe"]["seen"]
    assert f"chmod g-w,o-w {workdir}" in found["script"]["unsafe"]["remedy"]
    assert str(workdir) in found["storage"]["cluster.run_dir"]["unsafe"]["seen"]


def test_a_file_server_is_found_above_its_automounter(tmp_path: Path) -> None:
    systems = [("/", "ext4"), (str(tmp_path), "autofs"), (str(tmp_path), "nfs4"), ("/tm", "tmpfs")]
    table = [(point, kind, kind) for point, kind in systems]
    assert storage.file_system(str(tmp_path), table)["type"] == "nfs4"


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("torchrun --nnodes=2 --nproc-per-node 8 train.py", "torchrun"),
        ("exec ~/env/bin/torchrun train.py", "torchrun"),
        ("OMP_NUM_THREADS=1 torchrun $OPTIONS train.py", "torchrun"),
        ("python -m torch.distributed.launch --nnodes 2 train.py", "torch.distributed.launch"),
        ('export LAUNCHER="accelerate  launch \\', "accelerate launch"),
        ("deepspeed train.py --deepspeed ds.json", "deepspeed"),
        ("cd x && mpirun -np 4 ./train", "mpirun"),
        ("pip install deepspeed", ""),
        ("python -m pip install deepspeed --no-deps", ""),
        ("# torchrun --nnodes=2 train.py", ""),
        ("\t# torchrun --nnodes=2 train.py", ""),
        ("python train.py  # not torchrun --nnodes=2", ""),
        ("echo torchrun --nnodes=2", ""),
        ("python train.py --deepspeed ds.json", ""),
        ("python torchrun_like.py", ""),
    ],
)
def test_a_shell_script_that_starts_a_launcher(tmp_path: Path, line: str, launcher: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\nset -e\n{line}\n")
    assert launcher_of(str(script)) == launcher


def test_a_fifo_next_to_the_script_does_not_block(ask: Ask, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    os.mkfifo(tmp_path / "run.sh")
    assert ask("script", shell_script="run.sh")["script"]["launcher"] == ""
    (tmp_path / "a.py").touch()
    assert list(ask("script", code=True)["script"]["code"]) == ["a.py"]


@pytest.mark.parametrize(
    ("image", "there"), [("made.sif", True), ("~/made.sif", False), ("docker://lab/gpt", None)]
)
def test_the_image_file_of_apptainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, there: bool | None
) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    for folder in (work, home):
        folder.mkdir()
    (work / "made.sif").touch()
    program = work / "apptainer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(work))
    monkeypatch.setenv("HOME", str(home))
    request = {"container": {"engine": "apptainer", "image": image}, "workdir": str(work)}
    found = containers(request)
    assert (found["engine"], found.get("image"), found["gpus"]) == (True, there, None)

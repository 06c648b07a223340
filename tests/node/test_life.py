"""The environment of a job on its host, and the report of its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from dtrain.launchplan.environment import host_variables
from dtrain.node.agent.worker_files import MAX_READ
from dtrain.spec.model import Job
from support.limits import HANG, until
from support.node import Node, patient, written

HOSTILE = [
    "a b",
    "'single' \"double\"",
    "new\nline\ttab",
    "$(touch oops) `touch oops` ; touch oops",
    "*?[a-z]~",
    "-",
    "",
    "\\back\\slash\\",
    "ünïcødé 漢字 🚀",
    "\udcff\udc80 not UTF-8",
    "!history! %percent% #comment",
]

DUMP = """
import json, os, sys
fds = sorted(map(int, os.listdir("/proc/self/fd")))
with open("dump", "w") as file:
    json.dump({
        "argv": [os.fsencode(word).hex() for word in sys.argv[1:]],
        "environment": {name.hex(): value.hex() for name, value in os.environb.items()},
        "cwd": os.getcwd(), "sid": os.getsid(0), "pid": os.getpid(),
        "stdin": os.readlink("/proc/self/fd/0"), "fds": fds,
        "status": open("/proc/self/status").read(),
    }, file)
os.rename("dump", "dump.json")
"""


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def test_a_job_that_succeeds(host: Node) -> None:
    agent = host.start(host.shell("echo out; echo err >&2"), host.shell("printf none", 1))
    assert agent.wait() == 0
    assert agent.stderr == b""
    types = [message["type"] for message in agent.messages]
    assert types[0] == "hello"
    assert types[1] == "prepared"
    assert types[-1] == "bye"
    assert {(event["code"], event["signal"]) for event in agent.events if "code" in event} == {
        (0, None)
    }
    assert agent.events[-1]["event"] == "ended"
    assert agent.text("worker-0.out") == "out\n"
    assert agent.text("worker-0.err") == "err\n"
    assert agent.text("worker-1.out") == "none"
    assert "worker-1.err" in [stream["name"] for stream in agent.streams.values()]


@pytest.mark.parametrize("setup", [[], ["true"]])
def test_only_setup_lines_start_a_shell(host: Node, setup: list[str]) -> None:
    (host.workdir / "read-by-bash").write_text("touch started-bash\n")
    agent = host.agent(environment={"BASH_ENV": str(host.workdir / "read-by-bash")})
    worker = host.code("import os; print(os.environ['PWD'])")
    assert host.start(worker, setup=setup, agent=agent).wait() == 0
    assert (host.workdir / "started-bash").exists() == bool(setup)
    assert agent.text("worker-0.out") == f"{host.workdir}\n"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "en_US.ISO-8859-1"])
def test_arguments_and_environment_arrive_byte_for_byte(host: Node, locale: str) -> None:
    environment = {f"HOSTILE_{index}": text for index, text in enumerate(HOSTILE)}
    environment["hostile.name-1"] = "x"
    argv = [host.python, "-ISc", DUMP, *HOSTILE]
    agent = host.launch(
        host.process(argv, environment={**environment, "LAYER": "process"}),
        agent=host.agent(environment={"LC_ALL": locale, "PATH_TO": "kept", "LAYER": "host"}),
        setup=["export FROM_SETUP='from setup' LAYER=setup BOTH=setup"],
        environment={"LAYER": "launch", "BOTH": "launch"},
        secrets={"TOKEN": "s3cr\net'"},
    )
    agent.expect("prepared")
    agent.command("start")
    agent.wait()
    dump = json.loads((host.workdir / "dump.json").read_text())
    assert [bytes.fromhex(word) for word in dump["argv"]] == [raw(text) for text in HOSTILE]
    seen = {
        bytes.fromhex(name): bytes.fromhex(value) for name, value in dump["environment"].items()
    }
    wanted = {
        **environment,
        "LAYER": "process",
        "BOTH": "launch",
        "FROM_SETUP": "from setup",
        "PATH_TO": "kept",
        "TOKEN": "s3cr\net'",
        "DTRAIN_RUN_ID": "run",
        "DTRAIN_HOST": "node0",
        "DTRAIN_RUN_DIR": str(host.folder()),
        "TORCHELASTIC_ERROR_FILE": str(host.folder() / "worker-0.error.json"),
        "PYTHONUNBUFFERED": "1",
    }
    for name, value in wanted.items():
        assert seen[raw(name)] == raw(value), name
    assert b"DTRAIN_SETUP" not in seen
    assert not (host.workdir / "oops").exists()
    assert dump["cwd"] == str(host.workdir)
    assert dump["sid"] == dump["pid"]
    assert dump["stdin"] == "/dev/null"
    assert dump["fds"] == [0, 1, 2, 3]  # the last one lists the folder
    status = dict(line.split(":\t", 1) for line in dump["status"].splitlines() if ":\t" in line)
    # Python itself ignores PIPE and XFSZ; the agent blocks and ignores no other signal.
    ignored = {n for n in range(1, 32) if int(status["SigIgn"], 16) >> (n - 1) & 1}
    assert ignored == {signal.SIGPIPE, signal.SIGXFSZ}
    assert int(status["SigBlk"], 16) == 0


def test_a_shell_sees_no_ignored_signals(host: Node) -> None:
    agent = host.start(host.shell("grep SigIgn /proc/self/status"), setup=["trap '' HUP TERM"])
    agent.wait()
    assert agent.text("worker-0.out").split() == ["SigIgn:", "0" * 16]


def test_secrets_are_written_nowhere(host: Node) -> None:
    secret = "correct horse battery staple"  # noqa: S105
    agent = host.start(host.shell('test -n "$TOKEN" && exec sleep 600'), secrets={"TOKEN": secret})
    agent.event("started")
    for path in host.run_dir.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    for words in host.processes().values():
        assert secret not in words
    agent.command("kill")
    agent.wait()


def test_setup_and_workers_find_the_programs_beside_the_interpreter(host: Node) -> None:
    beside = host.workdir / "env" / "beside"
    beside.parent.mkdir()
    beside.write_text("#!/bin/sh\necho found\n")
    beside.chmod(0o755)
    front = host_variables(Job("torch"), {}, None, python="env/python")
    agent = host.start(
        host.shell('beside; echo "${PATH%%:*}"; echo "$PATH"'),
        setup=["beside >from-setup"],
        node_variables=written(front),
    )
    agent.wait()
    assert (host.workdir / "from-setup").read_text() == "found\n"
    found, first, path = agent.text("worker-0.out").splitlines()
    assert (found, first) == ("found", str(beside.parent))
    assert path.split(":").count(first) == 1


def test_setup_lines_run_in_the_bash_on_path(host: Node) -> None:
    own = host.workdir / "bash"
    own.write_text('#!/bin/sh\nexport RAN=own\nexec /bin/bash "$@"\n')
    own.chmod(0o755)
    agent = host.start(
        host.shell("echo $RAN"),
        setup=[":"],
        agent=host.agent(environment={"PATH": f"{host.workdir}:{os.environ['PATH']}"}),
    )
    agent.wait()
    assert agent.text("worker-0.out") == "own\n"


def test_setup_is_inherited(host: Node) -> None:
    setup = [
        "ulimit -n 321 -c 0",
        "umask 027",
        "cd /",
        "PYTHONHOME=/nowhere PYTHONPATH=/nowhere; export PYTHONHOME PYTHONPATH",
        "source ./env.sh 2>/dev/null || . work*/env.sh || export FOUND=no",
        "exec 9</dev/null",
    ]
    (host.workdir / "env.sh").write_text("export FOUND=yes\n")
    agent = host.start(
        host.shell(
            "ulimit -n; umask; echo $PYTHONHOME $FOUND; echo x > file; ls -l /proc/self/fd | wc -l"
        ),
        # Setup starts where the workers will.
        setup=[". ./env.sh", *setup[:4], *setup[5:]],
    )
    agent.wait()
    # Descriptors 0 to 2, the descriptor of the listing itself, and the total.
    assert agent.text("worker-0.out").split() == ["321", "0027", "/nowhere", "yes", "5"]
    assert stat.S_IMODE((host.workdir / "file").stat().st_mode) == 0o640


def test_files_are_for_their_owner_alone(host: Node) -> None:
    agent = host.agent()
    agent = host.start(host.shell("exit"), setup=["umask 000"])
    agent.wait()
    for path in host.run_dir.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stat.S_IMODE(host.run_dir.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "program, code, reason",
    [
        ("no-such-program", 127, "No such file or directory on PATH"),
        ("./missing", 127, "No such file or directory"),
        ("./plain", 126, "Permission denied"),
        ("./headless", 126, "Exec format error"),
        ("./orphan", 126, "its first line does not exist"),
    ],
)
def test_a_program_that_cannot_be_executed(
    host: Node, program: str, code: int, reason: str
) -> None:
    files = {"plain": (0o600, "x"), "headless": (0o700, "x"), "orphan": (0o700, "#!/no/such/sh\n")}
    for name, (mode, text) in files.items():
        (host.workdir / name).write_text(text)
        (host.workdir / name).chmod(mode)
    agent = host.start(host.process([program]), host.shell("exit", 1))
    exited = agent.event("exited", index=0)
    assert exited["code"] == code
    assert exited["error"]["message"].startswith(f"cannot run {program}: ")
    assert reason in exited["error"]["message"]
    assert agent.event("exited", index=1)["code"] == 0
    agent.wait()


def test_an_argument_that_no_program_can_be_given(host: Node) -> None:
    agent = host.start(host.process(["echo", "a\0b"]))
    assert "null byte" in agent.event("exited")["error"]["message"]
    agent.wait()


def test_a_workdir_removed_before_the_start(host: Node) -> None:
    agent = host.launch(host.shell("exit"))
    agent.expect("prepared")
    host.workdir.rmdir()
    agent.command("start")
    assert str(host.workdir) in agent.event("exited")["error"]["message"]
    agent.wait()


def test_a_signal_is_named(host: Node) -> None:
    agent = host.start(host.shell("kill -SEGV $$"))
    exited = agent.event("exited")
    assert (exited["code"], exited["signal"], exited["out_of_memory"]) == (None, "SIGSEGV", False)
    agent.wait()


@pytest.mark.parametrize(
    "written, message, traceback",
    [
        (
            {
                "message": {
                    "message": "ValueError: bad batch",
                    "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"},
                }
            },
            "ValueError: bad batch",
            "Traceback ...",
        ),
        ({"message": "just words", "timestamp": 1700000000}, "just words", ""),
        ({"message": {"message": 7}}, "7", ""),
        ({"message": {"message": "x" * 900_000}}, "x" * 4096, ""),
        ("not an object", "not an object", ""),
        (None, "{ not JSON", ""),
    ],
)
def test_the_error_file_of_a_worker_is_reported(
    host: Node, written: object, message: str, traceback: str
) -> None:
    text = "{ not JSON" if written is None else json.dumps(written)
    (host.workdir / "error").write_text(text)
    agent = host.start(host.shell('cat error > "$TORCHELASTIC_ERROR_FILE"; exit 1'))
    error = agent.event("exited")["error"]
    assert (error["message"], error["traceback"]) == (message, traceback)
    if "1700000000" in text:
        assert error["time"] == 1700000000
    agent.wait()


@pytest.mark.parametrize("relay", ["slow", "new"])
def test_the_end_comes_after_more_events_than_one_read_returns(host: Node, relay: str) -> None:
    """A relay that has not read them all must not take the end of the supervisor for its death."""
    error = {"message": {"message": "bad", "extraInfo": {"py_callstack": "x" * 16_384}}}
    (host.workdir / "error").write_text(json.dumps(error))
    fail = 'cp error "$TORCHELASTIC_ERROR_FILE"; exit 1'
    agent = host.launch(*[host.shell(fail, index) for index in range(70)])
    agent.expect("prepared")
    if relay == "slow":
        agent.pause_reading()
    agent.command("start")
    until(lambda: not host.processes("dtrain-supervisor"))
    agent.resume_reading()
    if relay == "new":
        agent.wait()
        agent = host.attach()
    agent.wait()
    assert agent.offsets["events"] > MAX_READ
    assert agent.events[-1]["event"] == "ended"
    assert agent.messages[-1]["type"] == "bye"
    assert "lost" not in [message["type"] for message in agent.messages]


def test_services_run_until_they_are_stopped(host: Node) -> None:
    agent = host.start(
        host.shell("exec sleep 600", role="ps", rank=None, service=True), host.shell("exit 0", 0)
    )
    agent.event("exited", role="worker")
    agent.command("ping")
    assert not [event for event in agent.events if event["event"] in ("stopping", "ended")]
    agent.command("stop", grace=HANG)
    exited = agent.event("exited", role="ps")
    assert (exited["signal"], exited["stopping"]) == ("SIGTERM", True)
    agent.wait()


def test_a_job_without_a_launcher_is_stopped(host: Node) -> None:
    agent = host.start(
        host.shell("trap 'echo asked; exit' TERM; while :; do sleep 0.05; done"), lease=0.5
    )
    agent.event("started")
    why = "no launcher for 0.5 seconds, and job.on_disconnect is stop"
    assert agent.event("stopping")["reason"] == why
    agent.wait()
    assert host.processes() == {}


def test_a_host_that_stood_still_waits_for_the_launcher_again(host: Node) -> None:
    """As a virtual machine that is paused for longer than the lease."""
    stand_still = (
        "sleep 0.5; kill -STOP $PPID; sleep 4; date +%s.%N > resumed; kill -CONT $PPID; sleep 600"
    )
    agent = host.start(host.shell(stand_still), lease=3.0)
    stopped = agent.event("stopping")["time"]
    assert stopped > float((host.workdir / "resumed").read_text()) + 0.5
    agent.wait()
    assert host.processes() == {}


def test_on_disconnect_keep_keeps_the_job(host: Node) -> None:
    agent = host.start(
        host.shell("until test -e go; do sleep 0.05; done"), lease=0.1, on_disconnect="keep"
    )
    agent.event("started")
    agent.close_stdin()
    agent.wait()
    second = host.attach()
    second.expect("attached")
    until(lambda: host.processes("until test"))
    (host.workdir / "go").touch()
    second.event("exited")
    second.wait()
    assert "stopping" not in [event["event"] for event in second.events]


def test_a_home_relative_job(host: Node) -> None:
    home = host.workdir / "home"
    (home / "work").mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin" / "py").symlink_to("/bin/sh")
    agent = host.launch(
        host.process(["~/bin/py", "-c", 'echo "$0 $PWD"', "~/x"]),
        agent=host.agent(environment={"HOME": str(home)}),
        run_dir="~/.runs",
        workdir="work",
        python="~/bin/py",
    )
    agent.expect("prepared")
    assert (home / ".runs/nodes/run/node0").is_dir()
    agent.command("start")
    agent.wait()
    assert agent.text("worker-0.out") == f"~/x {home}/work\n"


def test_an_idle_supervisor_and_relay_use_no_cpu(host: Node) -> None:
    agent = host.start(host.shell("exec sleep 600"))
    agent.event("started")
    (supervisor,) = host.processes("dtrain-supervisor")

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks(supervisor) + ticks(agent.pid)
    until(lambda: os.times().elapsed > start + 1.5) if (start := os.times().elapsed) else None
    assert ticks(supervisor) + ticks(agent.pid) - before <= 10  # hundredths of a second
    agent.command("kill")
    agent.wait()


def looks_of(host: Node, **body: Any) -> dict[str, Any]:
    """What /proc shows of the supervisor of a job that runs."""
    agent = host.start(host.shell("exec sleep 600"), **body)
    agent.event("started")
    (pid,) = host.processes("dtrain-supervisor")
    proc = Path(f"/proc/{pid}")

    def status() -> dict[str, str]:
        return dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())

    # The C library blocks all signals for a moment, while it starts a thread or a process.
    until(lambda: not int(status()["SigBlk"], 16))
    environment = dict.fromkeys((proc / "environ").read_bytes().split(b"\0"))
    session = (proc / "stat").read_text().rpartition(")")[2].split()[3]
    looks = {
        "argv": (proc / "cmdline").read_bytes(),
        "tag": [entry for entry in environment if entry.startswith(b"DTRAIN_RUN")],
        "names": {entry.partition(b"=")[0] for entry in environment} - {b"SHLVL", b"_"},
        "leads": session == str(pid),
        "cwd": (proc / "cwd").readlink(),
        "standard": [(proc / "fd" / fd).readlink().name for fd in "012"],
        "pipes": [fd for fd in (proc / "fd").iterdir() if fd.readlink().name.startswith("pipe")],
        "signals": (status()["SigIgn"], status()["SigCgt"]),
    }
    agent.command("kill")
    assert agent.wait() == 0
    shutil.rmtree(host.folder())
    return looks


def test_a_supervisor_looks_the_same_however_it_starts(host: Node) -> None:
    source = patient().replace(b"PR_SET_MM_MAP = 35, 14", b"PR_SET_MM_MAP = 35, -1")
    assert source != patient()
    copied = looks_of(host)
    assert copied["leads"]
    assert copied["standard"] == ["null", "agent.log", "agent.log"]
    assert copied["pipes"] == []
    assert f"DTRAIN_RUN_DIR={host.folder()}".encode() in copied["tag"]
    assert copied == looks_of(host, agent=host.agent(source=source))  # the kernel refuses
    after_setup = looks_of(host, setup=["true"])
    assert copied == {**after_setup, "names": after_setup["names"] - {b"DTRAIN_SETUP"}}

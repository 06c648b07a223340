"""Jobs in containers of a real podman behave as without containers."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.containers import container, containers
from support.limits import HANG

pytestmark = [pytest.mark.containers, pytest.mark.netns]

OF_THE_HOST = {"HOME", "LC_CTYPE", "MAIL", "PATH", "PWD", "SHELL", "SHLVL", "SSH_CLIENT"}
"""Variables of a login, which do not reach a container."""


def inside(*args: str, **more: Any) -> dict[str, Any]:
    work = {"framework": "none", "script": job("inside.py"), "args": [*args]}
    return {**work, "container": container(), "grace": "5s", **more}


def reports(launcher: Launcher, title: str) -> list[dict[str, Any]]:
    """What each worker has printed in the run with this title."""
    (run,) = (launcher.home / "runs").glob(f"{title}-*")
    logs = sorted(run.glob("logs/*/worker-*.out"))
    return [json.loads(log.read_bytes().replace(run.name.encode(), b"RUN")) for log in logs]


def test_environment_files_and_secrets(pair: Cluster, launcher: Launcher) -> None:
    for host in pair.hosts:
        (host.home / "work").mkdir()
    work = inside(
        "show",
        framework="torch",
        workdir="~/work",
        env={"LINES": "one\ntwo", "LD_LIBRARY_PATH": "/nowhere", "MINE": "{rank}"},
        secrets=["TOKEN"],
        rendezvous={"port": 29511},
    )
    for title in ("inside", "outside"):
        done = launcher.run(
            launcher.file(pair, work, name=f"{title}.yaml", title=title),
            env={"TOKEN": "hunter2 hunter2"},
        )
        assert done.code == 0, str(done)
        work.pop("container", None)
    for within, without in zip(
        reports(launcher, "inside"), reports(launcher, "outside"), strict=True
    ):
        own = without.pop("environment")
        own = {name: own[name] for name in own.keys() - OF_THE_HOST - {"SSH_CONNECTION"}}
        environment = within.pop("environment")
        assert {name: environment.get(name) for name in own} == own
        assert environment["HOME"] == environment["DTRAIN_RUN_DIR"]
        assert within == {**without, "inside": True}
        assert not within["shown"]
    for rank, host in enumerate(pair.hosts):
        made = host.home / "work" / f"made-{rank}"
        assert made.read_text() == "by a worker"
    assert launcher.left(pair) == {}


@pytest.mark.parametrize(
    ("args", "said"),
    [(["exit", "7"], "exited with status 7"), (["signal", "11"], "was killed by SIGSEGV")],
)
def test_ends(pair: Cluster, launcher: Launcher, args: list[str], said: str) -> None:
    done = launcher.run(launcher.file(pair, inside(*args)))
    assert done.code == 1
    assert said in done.stderr
    assert launcher.left(pair) == {}


def test_the_kernel_kills_a_worker_whose_container_is_out_of_memory(
    pair: Cluster, launcher: Launcher
) -> None:
    limited = container()
    limited["options"] += ["--memory", "64m", "--memory-swap", "64m"]
    done = launcher.run(launcher.file(pair, inside("fill", container=limited)))
    assert done.code == 1
    assert "was killed: out of memory" in done.stderr, str(done)
    assert launcher.left(pair) == {}


def test_term_reaches_the_worker_once(pair: Cluster, launcher: Launcher) -> None:
    launch = launcher.start(launcher.file(pair, inside("wait", grace="5m")))
    launch.until("waiting", count=2)
    assert [len(containers(host)) for host in pair.hosts] == [1, 1]
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130
    assert done.stdout.count("got TERM") == 2
    assert launcher.left(pair) == {}


def test_a_worker_that_ignores_term(pair: Cluster, launcher: Launcher) -> None:
    launch = launcher.start(launcher.file(pair, inside("wait", "ignore", grace="1s")))
    launch.until("waiting", count=2)
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130
    assert launcher.left(pair) == {}


def test_a_killed_supervisor(pair: Cluster, launcher: Launcher) -> None:
    launch = launcher.start(launcher.file(pair, inside("wait")))
    launch.until("waiting", count=2)
    pair["node2"].run("pkill", "-KILL", "-f", "dtrain-supervisor")
    done = launch.wait(HANG)
    assert done.code == 3, done
    assert launcher.left(pair) == {}


def test_stacks_of_a_silent_job(pair: Cluster, launcher: Launcher) -> None:
    file = launcher.file(pair, inside("wait", watchdog={"silence": "20s", "then": "stop"}))
    done = launcher.run(file, timeout=HANG)
    assert done.code == 1, done
    assert "ranks 0-1 on node[1-2]: in wait " in done.stderr, str(done)
    assert launcher.left(pair) == {}


def test_the_script_of_a_dry_run(pair: Cluster, launcher: Launcher) -> None:
    file = launcher.file(pair, inside("exit", "7"))
    done = launcher.run(file, "--dry-run", "--output", "written")
    assert done.code == 0, str(done)
    host = pair["node1"]
    script = launcher.folder / "written" / "node1" / "worker-0.sh"
    run = subprocess.run(host.command("bash", "-c", f'PATH=~/bin:$PATH; bash "{script}"'))
    assert run.returncode == 7
    assert launcher.left(pair) == {}


def test_a_missing_image(pair: Cluster, launcher: Launcher) -> None:
    file = launcher.file(pair, inside("show", container=container(image="localhost/other")))
    remedy = "run there: podman pull localhost/other"
    for command in ("check", "launch"):
        done = launcher.command(command, str(file)).wait()
        assert done.code == 3, str(done)
        assert remedy in done.stdout + done.stderr
    done = launcher.run(file, "--no-check")
    assert "pull it there" in done.stderr, str(done)
    assert launcher.left(pair) == {}

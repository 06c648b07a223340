"""Dry runs of complete cluster files, compared byte for byte with reviewed files.

Each case is a folder: ``cluster.yaml``, ``plan.txt`` and ``rendered/``, which ``--output`` writes.
Its ``plan.json`` is also what ``--json`` prints. ``--update-golden`` writes them anew; read the
`git diff`.
"""

from __future__ import annotations

import cProfile
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dtrain.diagnostics import UsageError
from dtrain.launchplan import shell
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.loading import load
from dtrain_cli.dry_run import rendered
from support.json_page import undocumented
from support.other_users import MALLORY, folder_of, scratch
from support.specs import read

CONFIGS = Path(__file__).parents[2] / "configs"
CASES = sorted(path for path in (Path(__file__).parent / "cases").iterdir() if path.is_dir())


@pytest.fixture(params=CASES, ids=lambda path: path.name)
def case(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def plan(case: Path) -> LaunchPlan:
    return build(read(case / "cluster.yaml"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_golden(case: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "plan.txt").write_text(rendered(plan(case)))
    rendered(plan(case), output=tmp_path / "rendered")
    if pytestconfig.getoption("--update-golden"):
        shutil.rmtree(case / "rendered", ignore_errors=True)
        shutil.copytree(tmp_path, case, dirs_exist_ok=True)
    expected = contents(case)
    del expected["cluster.yaml"]
    assert contents(tmp_path) == expected
    printed = rendered(plan(case), json=True)
    assert printed.encode() == expected["rendered/plan.json"]
    assert undocumented(json.loads(printed)) == set()


def test_scripts_are_valid_bash(case: Path) -> None:
    for name, text in shell.files(plan(case)):
        if name.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=text.encode(), check=True)


def test_no_secret_and_no_path_of_this_machine(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for secret in ("WANDB_API_KEY", "TOKEN"):
        monkeypatch.setenv(secret, "hunter2")
    rendered(plan(case), output=tmp_path / "rendered")
    written = b"".join(contents(tmp_path / "rendered").values())
    written += rendered(plan(case)).encode() + rendered(plan(case), json=True).encode()
    assert b"hunter2" not in written
    assert str(Path.cwd()).encode() not in written
    assert str(Path.home()).encode() + b"/" not in written


def test_ranks_are_consecutive_over_hosts() -> None:
    hosts = build(read(CONFIGS / "torch-8x8-a100.yaml")).hosts
    ranks = [process.rank for host in hosts for process in host.processes]
    assert ranks == list(range(64))
    last = hosts[2].processes[3].environment
    assert last == {"RANK": "19", "LOCAL_RANK": "3", "ROLE_RANK": "19"}


def test_tf_config_has_one_cluster_and_a_distinct_task_for_each_process() -> None:
    hosts = plan(CASES[0].parent / "tensorflow-parameter-server").hosts
    configs = [
        json.loads(process.environment["TF_CONFIG"]) for host in hosts for process in host.processes
    ]
    cluster = configs[0]["cluster"]
    assert all(config["cluster"] == cluster for config in configs)
    assert {role: len(tasks) for role, tasks in cluster.items()} == {
        "chief": 1,
        "worker": 4,
        "ps": 2,
    }
    endpoints = [endpoint for tasks in cluster.values() for endpoint in tasks]
    assert len(set(endpoints)) == len(endpoints)
    assert "[fd00::7]:4000" in endpoints


def test_a_plan_of_four_times_the_tasks_takes_four_times_the_calls() -> None:
    def calls(nodes: int) -> int:
        job = {"framework": "tensorflow", "script": "train.py"}
        cluster = {"slurm": {}, "nodes": nodes, "gpus": 1}
        spec = load({"cluster": cluster, "job": job}).spec()
        profile = cProfile.Profile()
        profile.runcall(build, spec)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(256) < 5 * calls(64)


def test_a_script_passes_every_byte(tmp_path: Path) -> None:
    """Run the hostile case: the program gets exactly the values of the cluster file."""
    spec = read(CASES[0].parent / "hostile" / "cluster.yaml")
    rendered(plan(CASES[0].parent / "hostile"), output=tmp_path / "rendered")
    home = tmp_path / "home"
    (home / "my runs" / "$HOME").mkdir(parents=True)
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$@" >"$RECORD"\nenv -0 >>"$RECORD"\n')
    fake.chmod(0o755)
    record = tmp_path / "record"
    subprocess.run(
        ["bash", str(tmp_path / "rendered" / "a" / "worker-0.sh")],
        env={
            "HOME": str(home),
            "PATH": f"{fake.parent}:{os.environ['PATH']}",
            "RECORD": str(record),
            "TOKEN": "secret",
        },
        check=True,
    )
    got = record.read_bytes().split(b"\0")
    assert got[0].decode() == str(home / "my runs" / "$HOME")
    count = 1 + len(spec.job.args)
    assert [arg.decode() for arg in got[1 : 1 + count]] == [spec.job.script, *spec.job.args]
    environment = dict(pair.split(b"=", 1) for pair in got[1 + count :] if pair)
    for name, value in spec.job.env.items():
        assert environment[name.encode()].decode() == value
    assert environment[b"A"] == b"b c"
    assert environment[b"TOKEN"] == b"secret"


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    rendered(plan(CASES[0].parent / "hostile"), output=tmp_path / "rendered")
    done = subprocess.run(
        ["bash", str(tmp_path / "rendered" / "a" / "worker-0.sh")],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "TOKEN" in done.stderr


def test_a_new_dry_run_removes_outdated_files(tmp_path: Path) -> None:
    case = tmp_path / "case"
    shutil.copytree(CASES[0].parent / "torchrun-static", case)
    rendered(plan(case), output=tmp_path / "out")
    cluster = case / "cluster.yaml"
    cluster.write_text(cluster.read_text().replace("hosts: [a, b]", "hosts: [a]"))
    rendered(plan(case), output=tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == [
        "a/torchrun-0.env",
        "a/torchrun-0.sh",
        "plan.json",
    ]
    assert not (tmp_path / "out" / "b").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")
def test_no_scripts_are_written_to_a_folder_where_another_user_replaces_them(
    tmp_path: Path,
) -> None:
    planted = folder_of(MALLORY, scratch(tmp_path / "scratch") / "out")
    (planted / "plan.json").touch()  # as of an earlier dry run
    with pytest.raises(UsageError, match="belongs to bin, in a folder that all users share"):
        rendered(plan(CASES[0]), output=planted)
    assert list(planted.iterdir()) == [planted / "plan.json"]


@pytest.mark.parametrize("rendezvous", ["{}", "{backend: static}", "{backend: c10d}"])
@pytest.mark.parametrize("own", ["", "4000"])
def test_scripts_use_the_port_of_the_caller(tmp_path: Path, rendezvous: str, own: str) -> None:
    program = run_by_hand(tmp_path, rendezvous, MASTER_PORT=own)
    assert (own or "29500") in program
    assert not own or "29500" not in program


def test_scripts_prefer_the_port_in_the_file(tmp_path: Path) -> None:
    assert "MASTER_PORT=29511" in run_by_hand(tmp_path, "{port: 29511}", MASTER_PORT="4000")


def run_by_hand(folder: Path, rendezvous: str, **environment: str) -> str:
    """The arguments and ports that the only script of a dry run passes to its program."""
    file = folder / "cluster.yaml"
    file.write_text(
        "cluster: {hosts: [a], gpus: 0, python: ./python}\n"
        f"job: {{framework: torch, script: t.py, workdir: {folder}, rendezvous: {rendezvous}}}\n"
    )
    rendered(build(read(file)), output=folder / "rendered")
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$@"; env | grep PORT\n')
    python.chmod(0o755)
    (script,) = (folder / "rendered" / "a").glob("*.sh")
    bash = ["bash", str(script)]
    path = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(bash, env=path | environment, capture_output=True, text=True, check=True)
    return done.stdout

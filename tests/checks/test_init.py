"""`dtrain init` writes a file that can be launched, and does not overwrite files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster
from dtrain.spec.model import Sync
from dtrain_cli import first_file
from dtrain_cli.commands import init as command
from support.cluster import Launcher
from support.machines import recorded_evidence
from support.specs import read

Hosts = Callable[..., Cluster]
FLAGS = ("--hosts", "gpu[01-02]", "--framework", "torch", "--script", "train.py")
"""Options for all questions."""


def test_from_flags_alone(launcher: Launcher) -> None:
    done = launcher.command("init", "first.yaml", *FLAGS, "--gpus", "4", "--no-probe").wait()
    assert done.code == 0, done
    spec = read(launcher.folder / "first.yaml")
    assert [host.name for host in spec.cluster.hosts] == ["gpu01", "gpu02"]
    assert spec.job.script == "train.py"
    assert spec.job.sync == Sync(".", (".git", ".venv"))
    assert "CHANGE" not in done.stdout
    dry = launcher.command("launch", "first.yaml", "--dry-run").wait()
    assert "8 processes on 2 hosts" in dry.stdout


def test_a_file_without_a_number_of_gpus_cannot_be_launched(launcher: Launcher) -> None:
    done = launcher.command("init", "first.yaml", *FLAGS, "--no-probe").wait()
    assert (done.code, "edit the lines marked CHANGE" in done.stdout) == (0, True), done
    launched = launcher.command("launch", "first.yaml").wait()
    assert launched.code == 2
    assert "cluster.gpus has no value" in launched.stderr
    assert "CHANGE: number of GPUs per host" in launched.stderr


def test_hosts_from_a_hostfile(launcher: Launcher) -> None:
    lines = ("gpu01 slots=8", "# a rack", "", "  gpu[02-03] # of Open MPI", "gpu04:8", "gpu01")
    (launcher.folder / "hosts").write_text("\n".join(lines), encoding="utf-8-sig")
    home = {"HOME": str(launcher.folder)}
    for name in ("./hosts", "~/hosts"):
        # gpu02 may have any number of slots.
        argv = ("init", "--force", *FLAGS, "--hosts", name, "--gpus", "2", "--no-probe")
        done = launcher.command(*argv, env=home).wait()
        assert done.code == 0, done
        spec = read(launcher.folder / "cluster.yaml")
        assert [host.name for host in spec.cluster.hosts] == ["gpu01", "gpu02", "gpu03", "gpu04"]
    (launcher.folder / "hosts").write_text("gpu01 slots=8\ngpu02:8 # of Open MPI\n")
    argv = ("init", "--force", *FLAGS, "--hosts", "./hosts", "--no-probe")
    assert launcher.command(*argv).wait().code == 0
    spec = read(launcher.folder / "cluster.yaml")
    assert [(host.name, len(host.gpus)) for host in spec.cluster.hosts] == [
        ("gpu01", 8),
        ("gpu02", 8),
    ]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("./none", "error: there is no file 'none'\nhint: name a file with a host on each line\n"),
        ("./empty", "error: './empty' lists no host\n"),
        ("/dev/zero", "error: '/dev/zero' is larger than 1024 KiB\n"),
        ("~nobody-has-this-name/hosts", "error: there is no file '~nobody-has-this-name/hosts'\n"),
        # No files, but lists of hosts with a mistake.
        ("gpu[1-2],10.0.0.0/24", "'10.0.0.0/24' cannot contain '/'\n"),
        ("gpu1/gpu2", "'gpu1/gpu2' cannot contain '/'\n"),
    ],
)
def test_what_is_no_hostfile(launcher: Launcher, hosts: str, message: str) -> None:
    (launcher.folder / "empty").write_text("# no host\n")
    done = launcher.command("init", *FLAGS, "--hosts", hosts, "--no-probe").wait()
    assert (done.code, message in done.stderr) == (2, True), done


def test_a_file_that_exists_is_kept(launcher: Launcher) -> None:
    file = launcher.folder / "cluster.yaml"
    file.write_text("mine\n")
    done = launcher.command("init", *FLAGS).wait()
    assert done.code == 2
    assert "--force" in done.stderr
    assert file.read_text() == "mine\n"
    assert launcher.command("init", *FLAGS, "--gpus", "0", "--force").wait().code == 0
    assert read(file).job.script == "train.py"


def test_a_module_as_written_for_python(tmp_path: Path) -> None:
    file = tmp_path / "first.yaml"
    given = {"hosts": "a", "framework": "torch", "gpus": 1, "probe": False}
    command.init(file, script="-m my.train", **given)
    job = read(file).job
    assert (job.module, job.script) == ("my.train", None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--framework", "torch", "--script", "a.py"), "set --hosts, or --slurm"),
        (("--hosts", "gpu[1-", "--framework", "torch", "--script", "a.py"), "--hosts gpu[1-"),
        (("--hosts", "a", "--framework", "jx", "--script", "a.py"), "tensorflow, jax or none\n"),
        ((*FLAGS, "--gpus", "-1"), "error: --gpus must be a whole number from 0 to"),
        (("--hosts", "a", "--framework", "torch", "--script", ""), "--script is missing"),
        (
            ("--hosts", "a", "--framework", "torch", "--script", "a.py -x"),
            "job.args or job.command",
        ),
        (
            ("--hosts", "a", "--framework", "torch", "--script", "-m a -x"),
            "or a module: '-m my.train'",
        ),
        (("--hosts", "a", "--framework", "torch", "--script", "-m "), "--script cannot be empty"),
        ((*FLAGS, "--user", "x y"), "error: --user cannot contain spaces\n"),
        ((*FLAGS, "--user", "x y", "--probe"), "error: --user cannot contain spaces\n"),
        (("--hosts", "a,a", *FLAGS[2:]), "the host 'a' is listed twice\nhint: keep one\n"),
    ],
)
def test_answers_that_make_no_file(launcher: Launcher, argv: tuple[str, ...], message: str) -> None:
    done = launcher.command("init", *argv).wait()
    assert done.code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (launcher.folder / "cluster.yaml").exists()


def test_a_question_is_asked_again_after_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, others = ["gpu[01-", "ml@gpu01", "gpu[01-02]"], ["jx", "jax", "-x", "train.py"]
    answers = iter([*hosts, *others, "maybe", "n", "many", "2"])
    monkeypatch.setattr("shutil.which", lambda _: None)  # no Slurm
    monkeypatch.setattr(command, "_interactive", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    file = tmp_path / "first.yaml"
    command.init(file)
    spec = read(file)
    assert ([host.name for host in spec.cluster.hosts], spec.job.script) == (
        ["gpu01", "gpu02"],
        "train.py",
    )
    said = capsys.readouterr().err
    assert "--hosts gpu[01-: " in said
    assert "--hosts: the host name 'ml@gpu01' contains a user" in said
    assert "--script cannot start with '-'" in said
    assert "--framework jx is unknown (use torch, tensorflow, jax or none)" in said
    assert "answer yes or no\n" in said
    assert "'many' is not a number\n" in said
    assert len(spec.cluster.hosts[0].gpus) == 2


@pytest.mark.parametrize("options", [{"user": "ml"}, {"gpus": 8}, {"probe": False}])
def test_options_of_ssh_are_not_ignored_where_slurm_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(command, "_interactive", lambda: True)
    monkeypatch.setattr(command, "_partitions", lambda *_, **__: pytest.fail("Slurm is asked"))
    answers = iter(["gpu[01-02]", *([] if "gpus" in options else ["8"])])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    given = {"framework": "torch", "script": "train.py", "probe": False, **options}
    command.init(tmp_path / "first.yaml", **given)
    spec = read(tmp_path / "first.yaml")
    assert [(host.name, len(host.gpus)) for host in spec.cluster.hosts] == [
        ("gpu01", 8),
        ("gpu02", 8),
    ]


@pytest.mark.parametrize(("file", "message"), [("no/c.yaml", "no such folder"), (".", "a folder")])
def test_a_file_that_cannot_be_written_is_refused_before_the_questions(
    launcher: Launcher, file: str, message: str
) -> None:
    done = launcher.command("init", file).wait()
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr


def test_hosts_are_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = recorded_evidence("dgx-a100", tmp_path, monkeypatch)
    answers = first_file.Answers(("gpu01", "gpu02"), "torch", "it's #1.py", "ml")
    text = first_file.text(answers, evidence)
    found = yaml.safe_load(text)
    assert found["cluster"] == {
        "hosts": "gpu[01-02]",
        "gpus": 8,
        "gpu": "a100-80gb",
        "network": {"interface": "eno1", "gbps": 1600},
        "ssh": {"user": "ml"},
    }
    assert found["job"]["script"] == "it's #1.py"
    assert "CHANGE" not in text


@pytest.mark.parametrize(
    ("asked", "found"), [(None, [8, 4]), (8, [8, 4]), (6, [6, 4]), (2, [2, 2]), (0, [0, 0])]
)
def test_no_host_gets_more_gpus_than_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, found: list[int]
) -> None:
    evidence = recorded_evidence("dgx-a100", tmp_path, monkeypatch)
    gpus = evidence.hosts[1].fact("gpus")
    gpus["gpus"] = gpus["gpus"][:4]
    answers = first_file.Answers(("gpu01", "gpu02"), "torch", "train.py", gpus=asked)
    (tmp_path / "first.yaml").write_text(first_file.text(answers, evidence))
    spec = read(tmp_path / "first.yaml")
    assert [len(host.gpus) for host in spec.cluster.hosts] == found


@pytest.mark.netns
def test_hosts_are_inspected_over_ssh(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    table = cluster["node1"].folder / "etc" / "hosts"
    table.write_text(table.read_text().replace(f"{cluster['node3'].address} node3\n", ""))
    config = launcher.folder / ".ssh" / "config"
    config.parent.mkdir(mode=0o700)
    config.write_text(
        f"Host node*\n  User root\n  IdentityFile {cluster.identity}\n"
        f"  UserKnownHostsFile {cluster.known_hosts}\n"
        + "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in cluster.hosts)
    )
    cluster["node2"].run("pkill", "sshd")
    flags = ("--hosts", "node[1-3]", "--framework", "torch", "--script", "train.py", "--probe")
    done = launcher.command("init", *flags, env={"HOME": str(launcher.folder)}).wait()
    assert done.code == 0, done
    assert "not reached: node2" in done.stdout
    assert "write the file again (--force)" in done.stdout
    spec = read(launcher.folder / "cluster.yaml")
    assert [host.interface for host in spec.cluster.hosts] == ["eth0"] * 3
    # node1 cannot resolve the name of node3.
    assert [host.address for host in spec.cluster.hosts] == [
        "node1",
        "node2",
        cluster["node3"].address,
    ]

"""Reading a cluster file: every key, defaults, and merged settings of hosts."""

import os
from pathlib import Path

import pytest

from dtrain.diagnostics import SpecError, UsageError
from dtrain.runtime.layout import Layout, Training
from dtrain.spec.load import parse
from dtrain.spec.model import (
    ClusterFile,
    Container,
    Elastic,
    Expected,
    Host,
    Mount,
    PrintedSteps,
    Rendezvous,
    Restart,
    Ssh,
    Sync,
    Watchdog,
)
from support.specs import read

CONFIGS = Path(__file__).parents[2] / "configs"

MINIMAL = """\
cluster: {hosts: [alpha, beta], gpus: 2}
job: {framework: torch, script: train.py}
"""

EVERY_KEY = (Path(__file__).parent / "every_key.yaml").read_text()


def load(text: str) -> ClusterFile:
    return parse(text, "folder/my cluster.yaml")


def job(keys: str) -> ClusterFile:
    return load(f"cluster: {{hosts: [a, b], gpus: 2}}\njob: {{script: t.py, {keys}}}")


def test_four_lines_launch_a_job() -> None:
    spec = load(MINIMAL)
    assert spec.name == "my-cluster"
    assert spec.cluster.hosts == (
        Host("alpha", "alpha", gpus=(0, 1)),
        Host("beta", "beta", gpus=(0, 1)),
    )
    assert spec.cluster.run_dir == "~/.dtrain"
    assert spec.cluster.spares == ()
    assert (spec.job.framework, spec.job.script, spec.job.module) == ("torch", "train.py", None)
    assert spec.job.rendezvous == Rendezvous()
    assert spec.job.rendezvous.port is None
    assert spec.job.rendezvous.first_port == 29500
    assert spec.job.layout is spec.job.training is spec.job.sync is spec.job.workdir is None


def test_every_key_is_read() -> None:
    spec = load(EVERY_KEY)
    ssh = Ssh(
        user="ml",
        port=22,
        identity="~/.ssh/cluster",
        jump="bastion",
        known_hosts="./known_hosts",
        host_keys="strict",
        config="./ssh_config",
        connect_timeout=90.0,
    )
    cluster, work = spec.cluster, spec.job
    assert spec.name == "gpt-100b"
    assert [host.name for host in cluster.hosts] == [f"gpu{n:02d}" for n in range(1, 9)]
    assert cluster.hosts[0] == Host(
        name="gpu01",
        address="gpu01",
        gpus=tuple(range(8)),
        gpu="a100-80gb",
        slots=4,
        interface="ib0",
        python="/opt/venv/bin/python",
        ssh=ssh,
    )
    assert [host.name for host in cluster.spares] == ["gpu09"]
    assert cluster.spares[0].gpus == tuple(range(8))
    assert (cluster.gbps, cluster.run_dir) == (1600.0, "/scratch/runs")
    assert cluster.trust_group == "lab"
    assert (cluster.tpu, work.strategy, work.strategy_reason) == ("2x4", "none", "")
    assert work.args[3:] == ("1e-5", "no", "010", "12:00:00", "", "a b")
    assert work.env == {"NCCL_DEBUG": "WARN", "FLAG": "yes", "NUMBER": "0x10", "EMPTY": ""}
    assert work.setup == ("source ~/env.sh", "ulimit -n 65536")
    assert work.container == Container(
        "ghcr.io/lab/train:1.2",
        "podman",
        (
            Mount("/data", "/data"),
            Mount("~/cache", "/cache"),
            Mount("/models", "/m", read_only=True),
            Mount("/etc/hosts", "/etc/hosts", read_only=True),
        ),
        ("--ulimit", "memlock=-1"),
    )
    assert work.sync == Sync(".", (".git", "*.pt"))
    assert work.secrets == ("WANDB_API_KEY",)
    assert work.rendezvous == Rendezvous("c10d", 29511)
    assert work.layout == Layout(
        tensor=7,
        pipeline=2,
        virtual_pipeline=2,
        schedule="gpipe",
        context=1,
        expert=2,
        data=4,
        sharding="hybrid",
        shard=2,
        micro_batch=4,
        grad_accumulation=32,
        recompute="selective",
        reduce="bf16",
        compile=True,
        sequence_parallel=True,
        offload=True,
    )
    assert work.training == Training(512, "bf16", 2048, 32, False, False)
    assert work.expected == Expected(7.15, 6.3, 66.4, 640.2, 312)
    assert work.restart == Restart(3, 120.0)
    assert work.elastic == Elastic(4)
    assert work.progress == PrintedSteps(("step {step}/{total} * loss {loss}",), 5000)
    assert work.watchdog == Watchdog(600.0, "restart")
    assert (work.grace, work.on_disconnect, work.lease) == (60.0, "keep", 5400.0)


def test_later_overrides_win_key_by_key() -> None:
    hosts = {host.name: host for host in load(EVERY_KEY).cluster.hosts}
    third, fourth = hosts["gpu03"], hosts["gpu04"]
    assert (fourth.gpus, fourth.workers, fourth.ssh.user) == ((), 4, "ubuntu")
    assert fourth.env == {"A": "1", "B": "2"}
    assert fourth.address == "gpu04"
    assert (third.gpus, third.gpu) == ((0, 1, 2, 3), "a100-40gb")
    assert third.address == "10.0.0.13"
    assert third.env == {"A": "1", "B": "3", "NCCL_SOCKET_IFNAME": "ens5"}
    assert (third.interface, third.python, third.transport) == ("ens5", "python3.11", "local")
    assert (third.ssh.user, third.ssh.port, third.ssh.identity) == ("ubuntu", 2222, "key")
    assert (third.ssh.host_keys, third.ssh.jump) == ("accept-new", "bastion")


def test_host_order_is_the_files_order() -> None:
    spec = load(MINIMAL.replace("[alpha, beta]", '["b[2-3]", a, "b1"]'))
    assert [host.name for host in spec.cluster.hosts] == ["b2", "b3", "a", "b1"]


@pytest.mark.parametrize(
    ("devices", "gpus", "workers"),
    [
        ("gpus: 0", (), 1),
        ("gpus: 0, slots: 3", (), 3),
        ("slots: 2", (), 2),
        ("gpus: 010", tuple(range(10)), 10),
        ("gpus: [3, 1]", (3, 1), 2),
    ],
)
def test_devices(devices: str, gpus: tuple[int, ...], workers: int) -> None:
    spec = load(f"cluster: {{hosts: a, {devices}}}\njob: {{framework: torch, script: t.py}}")
    (host,) = spec.cluster.hosts
    assert (host.gpus, host.workers) == (gpus, workers)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 10),
        ("0", 0),
        ("10s", 10),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("1d", 86400),
        ("'7s'", 7),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert job(f"framework: torch, grace: {text}").job.grace == seconds


def test_arguments_are_text_exactly_as_written() -> None:
    written = ["1e-5", "no", "010", "12:00:00", "~", "null", "0x1F", "+1_000", "2024-01-01", ".5"]
    assert job(f"framework: torch, args: [{', '.join(written)}]").job.args == tuple(written)


def test_one_setup_line_needs_no_list() -> None:
    assert job("framework: torch, setup: source env.sh").job.setup == ("source env.sh",)


def test_sections_may_be_empty() -> None:
    spec = load(
        "cluster:\n  hosts: [a]\n  gpus: 1\n  ssh:\n  overrides:\n  spares:\n"
        "job:\n  framework: torch\n  script: t.py\n  args:\n  env:\n  sync:\n  rendezvous:\n"
    )
    assert spec.job.sync == Sync(".")
    assert spec.job.rendezvous == Rendezvous()
    assert spec.job.args == ()


def test_tensorflow_roles() -> None:
    spec = job(
        "framework: tensorflow, roles: {evaluator: 1, ps: 2, worker: 4, chief: 1},"
        " strategy: parameter_server"
    )
    assert list(spec.job.roles.items()) == [
        ("chief", 1),
        ("worker", 4),
        ("ps", 2),
        ("evaluator", 1),
    ]
    assert job("framework: tensorflow, roles: {worker: 2, ps: 0}").job.roles == {"worker": 2}


def test_anchors_and_merge_keys() -> None:
    spec = load("""\
cluster:
  hosts: [a, b, c]
  gpus: 2
  overrides:
    a: &small {gpus: 1, env: {X: 1}, port: 2222}
    b: *small
    c: {<<: *small, gpus: 2}
job: {framework: torch, script: t.py}
""")
    assert [len(host.gpus) for host in spec.cluster.hosts] == [1, 1, 2]
    assert {host.ssh.port for host in spec.cluster.hosts} == {2222}


@pytest.mark.parametrize("override", ["port: 2222", "ssh: {port: 2222}"])
def test_an_override_gives_a_port_in_one_of_two_places(override: str) -> None:
    spec = load(MINIMAL.replace("gpus: 2", f"gpus: 2, overrides: {{beta: {{{override}}}}}"))
    assert [host.ssh.port for host in spec.cluster.hosts] == [None, 2222]


def test_in_a_merged_list_the_first_mapping_wins() -> None:
    spec = load("""\
cluster:
  hosts: [a, b, c]
  gpus: 2
  overrides:
    a: &a {user: a, port: 1}
    b: &b {user: b, interface: i}
    c: {<<: [*b, *a]}
job: {framework: torch, script: t.py}
""")
    host = spec.cluster.hosts[2]
    assert (host.ssh.user, host.ssh.port, host.interface) == ("b", 1, "i")


def test_a_byte_order_mark_and_windows_line_ends_are_fine() -> None:
    data = b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()
    assert parse(data, "x.yaml").cluster == load(MINIMAL).cluster


def test_json_is_fine() -> None:
    text = (
        '{"cluster": {"hosts": ["alpha", "beta"], "gpus": 2},'
        ' "job": {"framework": "torch", "script": "train.py"}}'
    )
    assert load(text) == load(MINIMAL)


@pytest.mark.parametrize(
    ("file", "name"),
    [("a/b.yaml", "b"), ("é é.yml", "job"), ("/", "job"), ("-", "job"), ("x" * 99, "x" * 64)],
)
def test_the_name_defaults_to_the_files(file: str, name: str) -> None:
    assert parse(MINIMAL, file).name == name


def test_hostile_text_is_not_changed() -> None:
    hostile = "a'b\\\"$(id); echo `x` \\n é 漢"
    quoted = "'" + hostile.replace("'", "''") + "'"
    spec = job(f"framework: torch, args: [{quoted}], env: {{X: {quoted}}}, workdir: {quoted}")
    assert spec.job.args == (hostile,)
    assert spec.job.env == {"X": hostile}
    assert spec.job.workdir == hostile


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    assert read(path).cluster.hosts


@pytest.mark.parametrize(
    "command",
    [
        "uv run --with deepspeed x.py",
        "uv run --with deepspeed --with torch python x.py",
        "conda run -n deepspeed --live-stream python x.py",
        "python x.py deepspeed --zero 3",
    ],
)
def test_a_name_of_a_launcher_alone_starts_none(command: str) -> None:
    text = f"cluster: {{hosts: [a, b], gpus: 2}}\njob: {{framework: torch, command: {command}}}"
    assert parse(text, "c.yaml").job.command == tuple(command.split())


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file '.*x\.yaml'") as caught:
        read(tmp_path / "x.yaml")
    assert caught.value.hint


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        read(tmp_path)


def test_a_program(tmp_path: Path) -> None:
    path = tmp_path / "train it.py"
    path.write_text("import torch\n")
    with pytest.raises(SpecError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert problem.message == "this is a Python program, not a cluster file"
    assert f"init --script '{path}'" in problem.hint


def test_a_link_that_leads_back_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.symlink_to(path)
    with pytest.raises(UsageError, match="lead back to themselves") as caught:
        read(path)
    assert "ls -l" in caught.value.hint


def test_a_file_without_read_permission(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.touch(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match="permission denied") as caught:
            read(path)
    finally:
        os.seteuid(user)
    assert "ls -l" in caught.value.hint


def test_an_invalid_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.yaml", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(UsageError, match="cannot be read"):
            read(path)


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(SpecError, match="larger than 1024 KiB"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("keys", "training"),
    [
        ("strategy: ddp, layout: {grad_accumulation: 4}", Training(16)),
        (
            "strategy: ddp, layout: {grad_accumulation: 4}, training: {precision: bf16}",
            Training(16, "bf16"),
        ),
        ("strategy: ddp, layout: {micro_batch: 4}", None),
        ("strategy: pipeline", None),
    ],
)
def test_given_accumulation_sets_the_global_batch(keys: str, training: Training | None) -> None:
    """With the default accumulation of a pipeline, the script may choose another batch."""
    assert job(f"framework: torch, {keys}").job.training == training

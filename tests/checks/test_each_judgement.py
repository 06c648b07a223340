"""Findings for facts that neither recorded machines nor hosts in namespaces have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.checks import Evidence, Finding, HostFacts
from dtrain.checks.judgement import before_launch, judge
from dtrain.diagnostics import ConnectError
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.node.facts.machine import accelerators
from dtrain.spec.load import parse

Facts = dict[str, Any]
GIB = 1 << 30


def plan(
    job: str = "framework: torch, script: train.py", *, gpus: int = 0, more: str = ""
) -> LaunchPlan:
    text = f'cluster:\n  hosts: ["gpu[1-3]"]\n  gpus: {gpus}\n{more}job: {{{job}}}\n'
    return build(parse(text, "cluster.yaml"))


def evidence(
    common: Facts, third: Facts | None = None, of: LaunchPlan | None = None, **last: Any
) -> Evidence:
    """Three hosts; the last one has the facts ``third`` over those in ``common``, and ``last``."""
    of = of or plan()
    *first, odd = of.hosts
    same = tuple(HostFacts(part, common) for part in first)
    return Evidence(of, (*same, HostFacts(odd, common | (third or {}), **last)))


def summaries(evidence: Evidence) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(one.severity.value, one.subject, one.hosts) for one in judge(evidence)]


def only(evidence: Evidence, severity: str, subject: str, *hosts: str) -> Finding:
    (found,) = judge(evidence)
    assert (found.severity.value, found.subject, found.hosts) == (severity, subject, hosts)
    return found


def folder(**odd: Any) -> Facts:
    found = {"path": "/w", "exists": True, "nearest": "/w", "total": 99 * GIB, "free": 50 * GIB}
    found |= {"inodes": 1 << 20, "inodes_free": 1 << 19, "mount": "/", "type": "ext4"}
    return found | {"source": "/dev/sda1", "not_writable": ""} | odd


def gpu(index: int, **odd: Any) -> Facts:
    found = {"index": index, "name": "NVIDIA L4", "uuid": None, "memory": 24 * GIB, "used": 0}
    return found | {"slowed": [], "processes": []} | odd


def gpus(*found: Facts, **odd: Any) -> Facts:
    return {"gpus": {"tool": "nvidia-smi", "driver": "550.54", "gpus": found} | odd}


def torch(**found: Any) -> Facts:
    framework = {"version": "2.6.0", "cuda": None, "gpus": 0, "distributed": True} | found
    return {"interpreter": {"status": 0, "python": "3.11.2", "framework": framework}}


def interface(**odd: Any) -> Facts:
    found = {"addresses": ["10.0.0.3"], "up": True, "state": "up", "mtu": 1500, "speed": 25000}
    return found | odd


def network(**interfaces: Facts) -> Facts:
    return {"network": {"interfaces": interfaces, "routes": {"gpu9": next(iter(interfaces))}}}


def test_a_slow_ssh_connection() -> None:
    found = only(evidence({}, latency=2.5), "warning", "ssh", "gpu3")
    assert "2.5 s" in found.seen


def test_a_slow_name_server() -> None:
    slow = {"names": {"hosts": {}, "reverse_seconds": 5.0}}
    found = only(evidence({"names": {"hosts": {}}}, slow), "warning", "names", "gpu3")
    assert "takes 5 s" in found.seen
    assert "/etc/hosts" in found.remedy


@pytest.mark.parametrize(
    ("job", "severity"),
    [
        ("framework: torch, script: train.py", "warning"),
        ("framework: torch, script: train.py, rendezvous: {backend: c10d}", "error"),
        ("framework: tensorflow, script: train.py", "error"),
    ],
)
def test_an_unknown_name_is_an_error_only_if_the_job_uses_it(job: str, severity: str) -> None:
    unknown = {"names": {"hosts": {"gpu2": {"error": "Name or service not known"}}}}
    only(evidence({}, unknown, of=plan(job)), severity, "names", "gpu3")
    first = {"names": {"hosts": {"gpu1": {"error": "Name or service not known"}}}}
    only(evidence({}, first, of=plan(job)), "error", "names", "gpu3")


def test_addresses_that_only_the_launching_machine_can_reach() -> None:
    """Each host is behind its own gateway, and hosts connect over the configured interface."""
    named = plan(more="  network: {interface: eth1}\n")
    eth1 = network(eth1=interface())

    def dialed(host: str, kind: str, **answer: Any) -> Facts:
        return {"host": host, "kind": kind, "address": "x", "port": 1, "source": None} | answer

    ways = (dialed("gpu2", "address", error="no route"), dialed("gpu2", "interface"))
    assert judge(evidence(eth1, of=named, dialed=ways)) == ()
    # But all hosts connect to the first host by its address.
    ways = (dialed("gpu1", "address", error="no route"), dialed("gpu1", "interface"))
    found = evidence(eth1, of=named, dialed=ways)
    only(found, "error", "network", "gpu1", "gpu3")
    assert judge(replace(found, hosts=found.hosts[1:])) == ()  # gpu1 has failed meanwhile


def test_a_route_by_another_interface() -> None:
    both = network(ib0=interface(), eth0=interface(addresses=["192.168.0.3"]))
    way = {"host": "gpu1", "kind": "interface", "address": "10.0.0.1", "port": 1}
    named = plan(more="  network: {interface: ib0}\n")
    right = evidence(both, of=named, dialed=({**way, "source": "10.0.0.3"},))
    assert judge(right) == ()
    copied = network(ib0=interface(), ipvs0=interface(addresses=["10.0.0.3"]))
    assert judge(evidence(copied, of=named, dialed=({**way, "source": "10.0.0.3"},))) == ()
    wrong = evidence(both, of=named, dialed=({**way, "source": "192.168.0.3"},))
    found = only(wrong, "warning", "route", "gpu3")
    assert "uses interface eth0" in found.seen
    assert "it uses ib0" in found.expected


def test_an_interface_without_an_address() -> None:
    named = plan(more="  network: {interface: ib0}\n")
    bare = network(ib0=interface(addresses=[]))
    found = only(evidence(network(ib0=interface()), bare, of=named), "error", "interface", "gpu3")
    assert "has no IP address" in found.seen


def test_a_link_that_differs_from_the_others() -> None:
    usual = network(eth0=interface())
    slow = network(eth0=interface(speed=1000))
    found = only(evidence(usual, slow), "warning", "network", "gpu3")
    assert "1 Gb/s; 25 Gb/s on gpu[1-2]" in found.seen
    found = only(evidence(usual, network(eth0=interface(mtu=1400))), "warning", "mtu", "gpu3")
    assert found.remedy == "sudo ip link set dev eth0 mtu 1500 there"


def test_a_host_without_infiniband() -> None:
    port = {"state": "ACTIVE", "rate": 400}
    there = {"infiniband": {"mlx5_0/1": port}}
    found = only(evidence(there, {"infiniband": {}}), "warning", "infiniband", "gpu3")
    assert "no RDMA device" in found.seen


@pytest.mark.parametrize(
    ("odd", "severity", "words"),
    [
        ({"inodes_free": 12}, "error", "12 inodes are free"),
        ({"free": 1 << 20}, "error", "1 MiB are free"),
        ({"free": 1 << 29}, "warning", "512 MiB are free"),
        ({"not_writable": "permission denied"}, "error", "permission denied"),
        ({"inodes": 0, "inodes_free": 0}, None, ""),
    ],
)
def test_folders_that_a_launch_writes_to(odd: Facts, severity: str | None, words: str) -> None:
    usual = {"storage": {"cluster.run_dir": folder()}}
    looked = evidence(usual, {"storage": {"cluster.run_dir": folder(**odd)}})
    if severity is None:
        assert judge(looked) == ()
    else:
        assert words in only(looked, severity, "cluster.run_dir", "gpu3").seen


def test_a_folder_without_a_free_inode() -> None:
    usual = {"storage": {"cluster.run_dir": folder()}}
    full = folder(not_writable="no space left on device")
    looked = evidence(usual, {"storage": {"cluster.run_dir": full}})
    remedy = only(looked, "error", "cluster.run_dir", "gpu3").remedy
    assert remedy.startswith("remove files there (`df -i`")


def test_folders_that_other_users_can_change() -> None:
    unsafe = {"seen": "/w belongs to bin", "remedy": "choose another folder"}
    usual = {"storage": {"cluster.run_dir": folder()}}
    looked = evidence(usual, {"storage": {"cluster.run_dir": folder(unsafe=unsafe)}})
    assert only(looked, "error", "cluster.run_dir", "gpu3").seen == "/w belongs to bin"
    script = {"workdir": "/w", "workdir_exists": True, "unsafe": None}
    looked = evidence({"script": script}, {"script": script | {"unsafe": unsafe}})
    assert only(looked, "error", "job.workdir", "gpu3").remedy == "choose another folder"


@pytest.mark.parametrize(
    ("per", "found"),
    [("", "run.sh starts torchrun, and each host runs it 2 times"), (", per: host", "")],
)
def test_a_script_that_starts_a_launcher_for_each_gpu(per: str, found: str) -> None:
    launch = plan(f"framework: torch, script: run.sh{per}", more="  slots: 2\n")
    script = {"workdir": "/w", "workdir_exists": True, "digest": "1", "launcher": "torchrun"}
    looked = evidence({"script": script}, {"script": script}, of=launch)
    sent = replace(evidence({}, {}, of=launch), script_in_source=True, launcher="torchrun")
    for each in (looked, sent):
        seen = [finding.seen for finding in judge(each) if finding.subject == "script"]
        assert seen == ([found] if found else [])
    # An earlier launch has sent the script, and it has changed since.
    changed = replace(looked, script_in_source=True, launcher="")
    assert not [finding for finding in judge(changed) if finding.subject == "script"]


@pytest.mark.parametrize(("count", "severity"), [(0, "warning"), (1, "warning"), (2, "error")])
def test_shared_memory_matters_most_between_gpus(count: int, severity: str) -> None:
    shm = folder(path="/dev/shm", nearest="/dev/shm", mount="/dev/shm")
    tight = shm | {"total": 8 * GIB, "free": 1 << 20}
    looked = evidence({"storage": {"shm": shm}}, {"storage": {"shm": tight}}, of=plan(gpus=count))
    assert "1 MiB of its 8 GiB" in only(looked, severity, "/dev/shm", "gpu3").seen


def test_a_folder_that_only_some_hosts_share() -> None:
    shared = folder(type="nfs4", source="filer:/home", mount="/home")
    looked = evidence({"storage": {"job.workdir": shared}}, {"storage": {"job.workdir": folder()}})
    found = only(looked, "warning", "job.workdir", "gpu3")
    assert "gpu[1-2] share filer:/home" in found.seen
    assert "mount filer:/home at /home" in found.remedy


def test_little_memory() -> None:
    roomy = {"memory": {"total": 64 * GIB, "available": 60 * GIB}}
    tight = {"memory": {"total": 64 * GIB, "available": GIB, "limit": 2 * GIB}}
    found = only(evidence(roomy, tight, of=plan(gpus=8)), "warning", "memory", "gpu3")
    assert "1 GiB of 2 GiB are available for 8 workers" in found.seen


def test_limits_of_processes_and_files() -> None:
    usual = {"status": 0, "python": "3.11.2"}
    limits = {"memlock": None, "nofile": 65536, "nproc": 100}
    few = evidence({"interpreter": usual}, {"interpreter": usual | {"limits": limits}})
    assert "100 processes" in only(few, "warning", "nproc", "gpu3").seen
    limits = {"memlock": None, "nofile": 512, "nproc": None}
    files = evidence({"interpreter": usual}, {"interpreter": usual | {"limits": limits}})
    assert "512 files" in only(files, "warning", "nofile", "gpu3").seen


def test_processors_that_differ() -> None:
    usual = {"governors": {"performance": 64}, "numa_nodes": 2, "architecture": "x86_64"}
    saving = usual | {"governors": {"powersave": 64}}
    found = only(evidence({"machine": usual}, {"machine": saving}), "warning", "cpu", "gpu3")
    assert found.remedy == "sudo cpupower frequency-set -g performance there"
    found = only(
        evidence({"machine": usual}, {"machine": usual | {"numa_nodes": 8}}),
        "warning", "cpu", "gpu3",
    )  # fmt: skip
    assert "8 NUMA nodes; 2 NUMA nodes on gpu[1-2]" in found.seen
    arm = {"machine": usual | {"architecture": "aarch64"}}
    only(evidence({"machine": usual}, arm), "warning", "hosts", "gpu3")


def test_workers_that_share_cores() -> None:
    slots = plan("framework: torch, script: train.py", more="  slots: 4\n")
    found = only(evidence({"machine": cores(8)}, {"machine": cores(2)}, slots), *SHARED)
    assert "4 workers share 2 cores" in found.seen
    # Enough cores, but not on the node of these GPUs.
    two_nodes: Facts = {"gpu_nodes": [0, 0, 1, 1], "node_cpus": {"0": 4, "1": 4}}
    odd: Facts = {**two_nodes, "node_cpus": {"0": 4, "1": 1}}
    facts = {"machine": cores(8, **two_nodes)}
    found = only(evidence(facts, {"machine": cores(5, **odd)}, plan(gpus=4)), *SHARED)
    assert "2 GPUs of the job are on NUMA node 1, but the affinity mask has 1 core" in found.seen
    unbound = plan("framework: torch, script: train.py, binding: none", gpus=4)
    assert not list(judge(evidence(facts, {"machine": cores(5, **odd)}, unbound)))


SHARED = "warning", "cpu", "gpu3"


def cores(count: int, **numa: Any) -> Facts:
    return {"hostname": "any", "boot": None, "network": 1, "cpus": count, **numa}


def test_one_machine_under_two_names() -> None:
    """It is a mistake, and an error if both claim the same GPUs."""
    one = {"machine": {"boot": "b", "network": 1, "hostname": "box"}}
    assert {severity for severity, _, _ in summaries(evidence(one))} == {"warning"}
    assert {severity for severity, _, _ in summaries(evidence(one, of=plan(gpus=2)))} == {"error"}


def test_one_name_for_two_machines() -> None:
    """NCCL identifies machines by host name and kernel."""
    machines = [{"machine": {"boot": "b", "network": n, "hostname": "box"}} for n in (1, 2)]
    for count, severity in ((0, "warning"), (1, "error")):
        first, second, _ = plan(gpus=count).hosts
        hosts = (HostFacts(first, machines[0]), HostFacts(second, machines[1]))
        only(Evidence(plan(gpus=count), hosts), severity, "hosts", "gpu1", "gpu2")


def test_gpus_that_are_missing() -> None:
    two = plan(gpus=2)
    found = only(evidence(gpus(gpu(0), gpu(1)), gpus(gpu(0)), of=two), "error", "gpu", "gpu3")
    assert "GPU 1 is missing" in found.seen
    none: Facts = {"gpus": {"pci": {}}}
    assert "no GPU" in only(evidence({}, none, of=two), "error", "gpu", "gpu3").seen
    bare: Facts = {"gpus": {"pci": {"NVIDIA": 2}}}
    assert "no driver" in only(evidence({}, bare, of=two), "error", "gpu", "gpu3").seen


def test_gpus_that_a_launch_misses() -> None:
    """It only counts them, by files of the kernel."""

    def counted(count: int) -> Facts:
        return {"machine": cores(8, gpu_nodes=[None] * count, accelerators=count > 0)}

    two = plan(gpus=2)
    assert not list(judge(evidence(counted(2), counted(8), of=two)))
    found = only(evidence(counted(2), counted(1), of=two), "warning", "gpu", "gpu3")
    assert found.seen == "1 GPU found; GPU 1 is missing"
    found = only(evidence(counted(2), counted(0), of=two), "warning", "gpu", "gpu3")
    assert "no GPU" in found.seen
    # Another vendor's devices, or device files that their driver has not made yet.
    unknown: Facts = {"machine": cores(8, gpu_nodes=[], accelerators=True)}
    assert not list(judge(evidence(counted(2), unknown, of=two)))
    assert not list(judge(evidence(counted(0))))


@pytest.mark.parametrize(
    "path",
    [
        "proc/driver/nvidia",
        "dev/dri/renderD128",
        "dev/nvidia0",
        "dev/dxg",
        "dev/accel0",
        "dev/vfio/0",
    ],
)
def test_signs_of_an_accelerator(tmp_path: Path, path: str) -> None:
    (tmp_path / "dev/dri/card0").mkdir(parents=True)
    (tmp_path / "dev/vfio/vfio").mkdir(parents=True)  # most machines have it
    assert not accelerators(str(tmp_path))
    (tmp_path / path).mkdir(parents=True)
    assert accelerators(str(tmp_path))


def test_gpus_and_drivers_that_differ() -> None:
    one = plan(gpus=1)
    other = gpus(gpu(0, name="NVIDIA T4", memory=16 * GIB))
    assert "NVIDIA T4" in only(evidence(gpus(gpu(0)), other, of=one), "warning", "gpu", "gpu3").seen
    older = gpus(gpu(0), driver="535.10")
    found = only(evidence(gpus(gpu(0)), older, of=one), "warning", "driver", "gpu3")
    assert found.remedy == "install driver 550.54 there"


def test_a_gpu_in_compute_mode_prohibited() -> None:
    closed = gpus(gpu(0, compute_mode="Prohibited"))
    found = only(evidence(gpus(gpu(0)), closed, of=plan(gpus=1)), "error", "gpu", "gpu3")
    assert found.remedy == "sudo nvidia-smi -i 0 -c DEFAULT there"


def test_a_gpu_in_use_by_an_unknown_process() -> None:
    used = gpus(gpu(0, used=4 * GIB))
    found = only(evidence(gpus(gpu(0)), used, of=plan(gpus=1)), "warning", "gpu", "gpu3")
    assert "fuser -v /dev/nvidia0" in found.remedy


@pytest.mark.parametrize(
    ("odd", "severity", "subject", "words"),
    [
        ({"nccl": "2.27.3"}, "error", "nccl", "NCCL 2.27.3; NCCL 2.21.5 on gpu[1-2]"),
        ({"cuda": "11.8"}, "warning", "cuda", "torch for CUDA 11.8"),
        ({"version": "2.5.1"}, "error", "torch", "torch 2.5.1; torch 2.6.0 on gpu[1-2]"),
        ({"distributed": False}, "error", "torch", "without torch.distributed"),
        ({"cuda": None}, "error", "torch", "CPU-only build"),
        ({"gpus": 1}, "error", "torch", "sees 1 of the 2 GPUs"),
    ],
)
def test_frameworks_that_do_not_fit(odd: Facts, severity: str, subject: str, words: str) -> None:
    usual = {"cuda": "12.4", "nccl": "2.21.5", "gpus": 2}
    found_gpus = gpus(gpu(0), gpu(1), cuda="12.8")
    looked = evidence(found_gpus | torch(**usual), torch(**usual | odd), of=plan(gpus=2))
    assert words in only(looked, severity, subject, "gpu3").seen


def test_packages_and_pythons_that_differ() -> None:
    usual = torch()["interpreter"] | {"packages": {"numpy": "2.1.0", "dill": "0.3.8"}}
    other = usual | {"packages": {"numpy": "1.26.4"}}
    found = only(
        evidence({"interpreter": usual}, {"interpreter": other}), "warning", "packages", "gpu3"
    )
    assert found.seen == "different from most hosts: dill missing, numpy 1.26.4"
    newer = {"interpreter": usual | {"python": "3.13.1"}}
    only(evidence({"interpreter": usual}, newer), "warning", "python", "gpu3")


def test_an_interpreter_that_dies_at_its_start_is_reported_with_its_reason() -> None:
    """As with a PYTHONHOME that belongs to another Python."""
    reason = "ModuleNotFoundError: No module named 'encodings'"
    stack = "Current thread 0x00007f7f015d2b80 (most recent call first):\n  <no Python frame>"
    died = {"interpreter": {"status": 1, "output": f"{reason}\n\n{stack}\n"}}
    usual = {"interpreter": {"status": 0, "python": "3.11.2"}}
    found = only(evidence(usual, died), "error", "python", "gpu3")
    assert found.seen.endswith(f"does not run: {reason}")
    assert found.remedy.startswith("unset PYTHONHOME")


def test_an_interpreter_without_enough_open_files() -> None:
    died = {"interpreter": {"status": 1, "output": "python3: Too many open files\n"}}
    usual = {"interpreter": {"status": 0, "python": "3.11.2"}}
    found = only(evidence(usual, died), "error", "python", "gpu3")
    assert found.remedy.startswith("raise the limit of open files: `ulimit -n`")


def test_a_module_that_is_not_found() -> None:
    usual = torch()["interpreter"] | {"module_found": {"found": True}}
    lost = {"interpreter": usual | {"module_found": {"found": False}}}
    job = plan("framework: torch, module: my.train")
    assert "my.train" in only(evidence({"interpreter": usual}, lost, of=job), "error", "module",
                              "gpu3").seen  # fmt: skip


def test_a_command_whose_program_is_not_there() -> None:
    usual = {"status": 0, "python": "3.11.2", "program_found": {"found": True}}
    lost = {"interpreter": usual | {"program_found": {"found": False}}}
    job = plan("framework: none, command: [train, --fast]")
    found = only(evidence({"interpreter": usual}, lost, of=job), "error", "program", "gpu3")
    assert found.seen == "there is no program train on PATH"


TAKEN = {"ports": {"29500": {"free": False, "reason": "in use", "holder": "process 7 (sshd)"}}}


def test_no_port_is_left() -> None:
    """It is an error if a launch can choose no other port."""
    taken = TAKEN["ports"]["29500"]
    assert only(evidence(TAKEN), "warning", "port", "gpu1")
    full = {"ports": {"29500": {**taken, "room": False}}}
    assert "widen job.rendezvous.ports" in only(evidence(full), "error", "port", "gpu1").remedy


def test_a_remedy_never_takes_over_a_folder_of_another_user() -> None:
    theirs = folder(not_writable="permission denied", stranger="eve")
    for severity, subject in (("error", "cluster.run_dir"), ("warning", "job.workdir")):
        found = evidence({}, {"storage": {subject: theirs}})
        remedy = only(found, severity, subject, "gpu3").remedy
        assert "chown" not in remedy
        assert "ask eve to share /w with a group" in remedy
        assert ("job.sync" in remedy) is (subject == "job.workdir")


@pytest.mark.parametrize(
    ("path", "there", "missing"),
    [("/home/ml/.dtrain", "/home", "/home/ml"), ("/scratch/ml/my runs", "/scratch", None)],
)
def test_a_remedy_never_takes_over_a_folder_of_all_users(
    path: str, there: str, missing: str | None
) -> None:
    found = folder(path=path, nearest=there, exists=False, not_writable="permission denied")
    machine = {"home": "/home/ml", "user": "ml"}
    looked = evidence({}, {"storage": {"cluster.run_dir": found}, "machine": machine})
    made = missing or f"'{path}'"
    assert only(looked, "error", "cluster.run_dir", "gpu3").remedy == (
        f"sudo install -d -o ml {made} there, or set cluster.run_dir to another folder"
    )


def test_a_launch_omits_findings_that_it_handles_itself() -> None:
    """A taken port that another can replace, and unreachable hosts."""
    moving = evidence(TAKEN)
    assert len(judge(moving)) == 1
    assert before_launch(moving) == ()
    fixed = plan("framework: torch, script: train.py, rendezvous: {port: 29500}")
    assert len(before_launch(evidence(TAKEN, of=fixed))) == 1
    lost = ConnectError("gpu2", "looking at the host", "no answer", hint="log in there")
    silent = Evidence(plan(), evidence({}).hosts, (lost,))
    assert len(judge(silent)) == 1
    assert before_launch(silent) == ()
    # If there is another error, both are reported.
    broken = evidence({}, {"storage": {"cluster.run_dir": folder(free=0)}})
    both = Evidence(plan(), broken.hosts, (lost,))
    assert [one.subject for one in before_launch(both)] == ["ssh", "cluster.run_dir"]


def test_another_run_uses_the_gpus_of_a_host() -> None:
    busy = {"machine": {"runs": ("old run",)}}
    found = only(evidence({}, busy, plan(gpus=1)), "warning", "processes", "gpu3")
    assert "run old run is running there" in found.seen
    assert "dtrain stop 'old run'" in found.remedy
    assert summaries(evidence({}, busy)) == []
    counted = {**busy, "leftovers": {"old run": (7, 8)}}
    assert (
        "2 processes"
        in only(evidence({}, counted, plan(gpus=1)), "warning", "processes", "gpu3").seen
    )


def test_a_run_is_stopped_by_the_name_of_its_launch() -> None:
    """Hosts add the number of an attempt, by which its processes are found there."""
    run = "llama-20260101-000000-abc123"
    for count in ("machine", {"runs": (f"{run}.2",)}), ("leftovers", {f"{run}.2": (7,)}):
        found = only(evidence({}, dict([count]), plan(gpus=1)), "warning", "processes", "gpu3")
        assert f"run {run}.2 " in found.seen
        assert f"dtrain stop {run}," in found.remedy
        assert ("grep" in found.remedy) == (f"DTRAIN_RUN_ID={run}.2" in found.remedy)


def test_collectives_of_jax_on_cpus_go_where_the_own_name_leads() -> None:
    third = {"names": {"hosts": {}, "own": {"addresses": ["127.0.1.1"]}}}
    jax = "framework: jax, script: train.py"
    same = {"names": {"hosts": {}, "own": {"addresses": ["10.0.0.1"]}}}
    found = only(evidence(same, third, plan(jax)), "warning", "names", "gpu3")
    assert "127.0.1.1" in found.seen and "/etc/hosts" in found.remedy
    assert summaries(evidence(same, third)) == []
    assert summaries(evidence(same, third, plan(jax, gpus=1))) == []
    unknown = {"names": {"hosts": {}, "own": {"addresses": []}}}
    assert summaries(evidence(same, unknown, plan(jax))) == []


@pytest.mark.parametrize(
    ("engine", "found", "seen", "remedy"),
    [
        ("podman", {"engine": False}, "podman is not installed", "apt-get install podman"),
        (
            "podman",
            {"engine": True, "image": False, "gpus": True},
            "podman has no image lab/gpt:1",
            "run there: podman pull lab/gpt:1",
        ),
        (
            "docker",
            {"engine": True, "failed": "warning\npermission denied: /var/run/docker.sock"},
            "docker does not work: permission denied: /var/run/docker.sock",
            "usermod -aG docker",
        ),
        (
            "docker",
            {"engine": True, "failed": "Cannot connect to the Docker daemon"},
            "docker does not work: Cannot connect to the Docker daemon",
            "run there: docker info",
        ),
        (
            "podman",
            {"engine": True, "image": True, "gpus": False},
            "podman cannot give GPUs to containers",
            "nvidia-ctk cdi generate",
        ),
    ],
)
def test_containers(engine: str, found: Facts, seen: str, remedy: str) -> None:
    job = f"framework: none, script: a.py, container: {{engine: {engine}, image: lab/gpt:1}}"
    good = {"container": {"engine": True, "image": True, "gpus": True}}
    judged = only(
        evidence(good, {"container": found}, plan(job, gpus=1)), "error", "container", "gpu3"
    )
    assert judged.seen == seen
    assert remedy in judged.remedy


def test_setup_lines_may_find_the_container_engine() -> None:
    job = "framework: none, script: a.py, setup: module load apptainer,"
    job += " container: {engine: apptainer, image: /a.sif}"
    assert judge(evidence({"container": {"engine": False}}, of=plan(job))) == ()


def test_a_python_without_torch() -> None:
    lacks = {"interpreter": {"status": 0, "python": "3.11.2", "framework": {"missing": True}}}
    assert "set cluster.python" in only(evidence(torch(), lacks), "error", "torch", "gpu3").remedy

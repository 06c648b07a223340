"""Processes run on the cores of their GPU's NUMA node, with memory preferred there."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from dtrain.node.agent.spawn import spawn
from dtrain.node.numa import Binding, bindings, node_cpus
from support.node import node

ALL = range(256)

# As `nvidia-smi topo -m` prints it on a DGX A100, whose firmware makes 4 nodes of each socket.
DGX_A100 = {
    "0000:07:00.0": 3,
    "0000:0f:00.0": 3,
    "0000:47:00.0": 1,
    "0000:4e:00.0": 1,
    "0000:87:00.0": 7,
    "0000:90:00.0": 7,
    "0000:b7:00.0": 5,
    "0000:bd:00.0": 5,
}
NPS4 = {n: f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{143 + 16 * n}" for n in range(8)}
TWO_SOCKETS = {0: "0-51,104-155", 1: "52-103,156-207"}
HGX_H100 = dict.fromkeys(["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:61:00.0"], 0) | (
    dict.fromkeys(["0000:9d:00.0", "0000:c3:00.0", "0000:d1:00.0", "0000:df:00.0"], 1)
)


def machine(root: Path, cores: dict[int, str], gpus: dict[str, int]) -> str:
    """The files that NVIDIA's driver and the kernel have for these nodes and GPUs."""
    for number, cpulist in cores.items():
        write(root / f"sys/devices/system/node/node{number}/cpulist", cpulist)
    write(root / "sys/devices/system/node/possible", "0-255")
    for minor, (address, number) in enumerate(gpus.items()):
        write(root / f"sys/bus/pci/devices/{address}/numa_node", str(number))
        information = f"Model: \t\t NVIDIA\nBus Location: \t {address}\nDevice Minor: \t {minor}"
        write(root / f"proc/driver/nvidia/gpus/{address}/information", information)
        write(root / f"dev/nvidia{minor}", "")
    return str(root)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def nodes(found: list[Binding | None]) -> list[int | None]:
    return [one.node if one is not None else None for one in found]


def test_each_rank_is_bound_to_the_node_of_its_gpu(tmp_path: Path) -> None:
    root = machine(tmp_path, NPS4, DGX_A100)
    found = bindings([(gpu,) for gpu in range(8)], ALL, root)
    assert nodes(found) == [3, 3, 1, 1, 7, 7, 5, 5]
    assert found[0] is not None
    assert found[0].cpus == {*range(48, 64), *range(176, 192)}  # shared with rank 1


def test_processes_with_several_gpus_are_bound_if_these_share_a_node(tmp_path: Path) -> None:
    root = machine(tmp_path, TWO_SOCKETS, HGX_H100)
    assert nodes(bindings([(0, 1, 2, 3), (4, 5)], ALL, root)) == [0, 1]
    assert nodes(bindings([(3, 4), (), (9,)], ALL, root)) == [None, None, None]


def test_the_affinity_mask_limits_the_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, TWO_SOCKETS, HGX_H100)
    (found,) = bindings([(4,)], {0, 1, 52, 53}, root)
    assert found is not None
    assert found.cpus == {52, 53}
    # Fewer cores than ranks there: bound, they would wait for each other.
    assert nodes(bindings([(0,), (4,), (5,), (6,)], {0, 52, 53}, root)) == [0, None, None, None]


def test_nothing_is_bound_where_nodes_are_unknown(tmp_path: Path) -> None:
    one = machine(tmp_path / "one", {0: "0-31"}, dict.fromkeys(DGX_A100, 0))
    unknown = machine(tmp_path / "unknown", TWO_SOCKETS, dict.fromkeys(DGX_A100, -1))
    none = machine(tmp_path / "none", TWO_SOCKETS, {})
    for root in (one, unknown, none):
        assert nodes(bindings([(0,), (1,)], ALL, root)) == [None, None]


def test_gpus_that_a_scheduler_hides_are_not_counted(tmp_path: Path) -> None:
    """A cgroup forbids their device files. CUDA does not count them, either."""
    root = machine(tmp_path, NPS4, DGX_A100)
    (tmp_path / "dev/nvidia0").unlink()
    (tmp_path / "dev/nvidia1").unlink()
    assert nodes(bindings([(0,), (2,)], ALL, root)) == [1, 7]


def test_gpus_of_amd(tmp_path: Path) -> None:
    root = machine(tmp_path, TWO_SOCKETS, {})
    topology = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(topology / "0/properties", "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0")
    for kfd_node, (bus, number) in enumerate([(0x05, 0), (0x85, 1)], 1):
        text = f"cpu_cores_count 0\nsimd_count 1216\nlocation_id {bus << 8}\ndomain 0"
        write(topology / f"{kfd_node}/properties", text)
        write(tmp_path / f"sys/bus/pci/devices/0000:{bus:02x}:00.0/numa_node", str(number))
    assert nodes(bindings([(0,), (1,)], ALL, root)) == [0, 1]


def test_the_nodes_of_this_machine() -> None:
    cores = node_cpus()
    assert os.sched_getaffinity(0) <= frozenset().union(*cores.values())
    (found,) = bindings([(0,)], os.sched_getaffinity(0))
    assert found is None or (len(cores) > 1 and found.cpus <= cores[found.node])


def test_a_bound_process_has_its_cores_and_prefers_its_memory(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    report = tmp_path / "report"
    script = (
        f"grep Cpus_allowed_list /proc/self/status; head -n1 /proc/self/numa_maps; echo > {report}"
    )
    with (tmp_path / "out").open("wb") as out:
        outputs = out.fileno(), out.fileno()
        environment = {b"PATH": os.environb[b"PATH"]}
        argv = [b"bash", b"-c", script.encode()]
        pid, failure = spawn(argv, environment, b"/", outputs, binding=Binding(0, {cpu}))
    assert failure is None
    assert os.waitpid(pid, 0)[1] == 0
    cores, memory = (tmp_path / "out").read_text().splitlines()
    assert cores.split() == ["Cpus_allowed_list:", str(cpu)]
    assert memory.split()[1] in ("prefer:0", "prefer=relative:0", "prefer"), memory


@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")
def test_an_agent_binds_the_ranks_of_a_job(tmp_path: Path, python: str) -> None:
    """On a machine that has other nodes and GPUs mounted over its own."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    cores = {0: str(first), 1: str(second)}
    root = Path(machine(tmp_path, cores, {"0000:07:00.0": 1, "0000:0f:00.0": 0}))
    for information in root.glob("proc/driver/nvidia/gpus/*/information"):
        information.write_text("")  # these GPUs have no device files here
    mounts = [
        shlex.join(["mount", "--bind", f"{root}/{folder}", f"/{folder}"])
        for folder in ("proc/driver", "sys/devices/system/node", "sys/bus/pci/devices")
    ]
    wrapper = tmp_path / "python"
    inside = " && ".join([*mounts, f'exec {shlex.quote(python)} "$@"'])
    wrapper.write_text(f'#!/bin/sh\nexec unshare --mount sh -c {shlex.quote(inside)} sh "$@"\n')
    wrapper.chmod(0o755)
    allowed = "grep Cpus_allowed_list /proc/self/status"
    with node(str(wrapper)) as host:
        workers = [host.shell(allowed, rank, bound_to_gpus=[rank]) for rank in range(2)]
        agent = host.start(*workers, host.shell(allowed, 2))
        agent.wait()
    assert [agent.text(f"worker-{rank}.out").split()[-1] for rank in range(2)] == [
        str(second),
        str(first),
    ]
    assert agent.text("worker-2.out").split()[-1] != str(first)

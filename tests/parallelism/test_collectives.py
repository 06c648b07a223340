"""The equations of collectives and of the micro-batches in flight, with numbers that make them easy
to check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.collectives import Group
from dtrain.parallelism.cost.stages import in_flight, stage_layers
from dtrain.parallelism.model.models import model
from dtrain.runtime.layout import Layout

# Links of 100 GB/s between the 8 GPUs of a host; 40 GB/s between hosts.
CLUSTER = GpuCluster(replace(hardware().gpu("a100-80gb"), link=100.0), 64, 8, 40.0)
MADE = Efficiency(
    link=0.5, network=0.5, exchange=0.5, latency=1e-3, link_step=1e-5, network_step=1e-4,
)  # fmt: skip


def group(size: int, stride: int) -> Group:
    return Group(CLUSTER, MADE, size, stride)


@pytest.mark.parametrize(
    ("size", "stride", "local"), [(8, 1, 8), (4, 2, 4), (8, 8, 1), (16, 1, 8), (16, 2, 4)]
)
def test_members_in_one_host(size: int, stride: int, local: int) -> None:
    assert group(size, stride).local == local
    assert group(size, stride).within_host is (local == size)


def test_bandwidth() -> None:
    assert group(8, 1).bandwidth == 50e9
    # The 8 groups of a host share its network.
    assert group(8, 8).bandwidth == 40e9 / 8 / 2
    assert group(16, 1).bandwidth == 40e9 / 2
    # A link that is slower than the network.
    slow = replace(CLUSTER, gpu=replace(CLUSTER.gpu, link=10.0))
    assert Group(slow, MADE, 16, 1).bandwidth == 5e9


def test_a_ring() -> None:
    one, inside, across = group(1, 1), group(8, 1), group(64, 1)
    assert one.all_gather(1e6) == inside.all_gather(0) == inside.all_reduce(0) == 0
    assert inside.all_gather(1e6) == pytest.approx(1e-3 + 7e-5 + 7 / 8 * 1e6 / 50e9)
    assert inside.all_reduce(1e6) == pytest.approx(2 * inside.all_gather(1e6))
    # Eight hosts: seven steps between hosts, and seven in each of them.
    gathered = across.all_gather(8e6)
    assert gathered == pytest.approx(1e-3 + 7e-4 + 56e-5 + 63 / 64 * 8e6 / 20e9)


def test_all_reduces_use_trees_between_many_hosts() -> None:
    across = group(64, 1)
    # Three doublings of hosts, and one chain of seven steps in a host.
    start = 1e-3 + 3e-4 + 7e-5
    assert across.all_reduce(8e6) == pytest.approx(2 * (start + 63 / 64 * 8e6 / 20e9))
    assert across.all_reduce(8e6) < 2 * across.all_gather(8e6)


def test_tokens_to_experts() -> None:
    assert group(1, 1).exchange(1e6, 2) == group(8, 1).exchange(0, 2) == 0
    assert group(8, 1).exchange(1e6, 2) == pytest.approx(1e-3 + 2e6 * 7 / 8 / 50e9)
    # Two copies to two hosts: half of the members are elsewhere, so 3 of 4 tokens leave the host.
    assert group(16, 1).exchange(1e6, 2) == pytest.approx(1e-3 + 0.75e6 / (40e9 / 2 / 8))


def test_one_member_to_the_next() -> None:
    assert group(1, 1).send(1e6) == group(8, 1).send(0) == 0
    assert group(8, 1).send(1e6) == pytest.approx(1e-3 + 1e6 / 70e9)
    assert group(8, 8).send(1e6) == pytest.approx(1e-3 + 1e6 / (40e9 / 2 / 8))


def test_a_pair_without_a_switch_has_one_of_the_links() -> None:
    """Eight GPUs with seven links each: 700 GB/s together, 100 GB/s to another one."""
    mesh = replace(CLUSTER, gpu=replace(CLUSTER.gpu, link=700.0, mesh=8))
    whole, four, two = (Group(mesh, MADE, size, 1) for size in (8, 4, 2))
    assert [one.bandwidth for one in (whole, four, two)] == [350e9, 150e9, 50e9]
    assert two.exchange(1e6, 1) == pytest.approx(1e-3 + 0.5e6 / 50e9)
    assert whole.send(1e6) == pytest.approx(1e-3 + 1e6 / 70e9)
    assert Group(mesh, MADE, 8, 8).bandwidth == group(8, 8).bandwidth


def test_an_oversubscribed_network_between_racks() -> None:
    # Two hosts in a rack, each with 5 of 40 GB/s to other racks.
    racks = replace(CLUSTER, rack_hosts=2, between_racks=5.0)
    inside = Group(racks, MADE, 16, 1)
    assert inside.bandwidth == group(16, 1).bandwidth
    assert inside.exchange(1e6, 1) == group(16, 1).exchange(1e6, 1)
    # A ring leaves its rack once: it has the share of both hosts.
    assert Group(racks, MADE, 64, 1).bandwidth == 10e9 / 2
    enough = replace(racks, between_racks=20.0)
    assert Group(enough, MADE, 64, 1).bandwidth == group(64, 1).bandwidth
    # A stage of two hosts sends to the next rack.
    assert Group(racks, MADE, 4, 16).send(1e6) == pytest.approx(1e-3 + 1e6 / (5e9 / 2 / 8))
    # Of the tokens that leave a host, two of three go to the other rack.
    assert Group(racks, MADE, 32, 1).exchange(1e6, 1) == pytest.approx(
        1e-3 + 0.75e6 * 2 / 3 / (5e9 / 2 / 8)
    )


@pytest.mark.parametrize(
    ("schedule", "virtual", "held"),
    [
        ("gpipe", 1, [16, 16, 16, 16]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("zb-2p", 1, [8, 6, 4, 2]),
        ("zb-v", 1, [4, 4, 4, 4]),
        ("1f1b", 2, [5.5, 4.5, 3.5, 2.5]),
    ],
)
def test_micro_batches_in_flight(schedule: str, virtual: int, held: list[float]) -> None:
    layout = Layout(
        backend="megatron", pipeline=4, virtual_pipeline=virtual, schedule=schedule,  # type: ignore[arg-type]
        grad_accumulation=16,
    )  # fmt: skip
    assert [in_flight(layout, stage) for stage in range(4)] == held
    # Never more than a step has.
    few = replace(layout, grad_accumulation=2)
    assert [in_flight(few, stage) for stage in range(4)] == [min(2, each) for each in held]
    # Megatron-LM's overlap of exchanges needs interleaving, and warms up with one chunk more.
    more = [in_flight(layout, stage, hides_exchange=True) for stage in range(4)]
    assert more == [each + (1 / virtual if virtual > 1 else 0) for each in held]


def test_layers_of_uneven_stages() -> None:
    shape = replace(model("llama-3-8b"), layers=10)
    # The runtime gives inner stages one more. Elsewhere the ends, which do more, get fewer.
    assert stage_layers(shape, Layout(pipeline=4)) == (2, 3, 3, 2)
    assert stage_layers(shape, Layout(pipeline=5)) == (2, 2, 2, 2, 2)
    assert stage_layers(shape, Layout(backend="megatron", pipeline=4)) == (3, 3, 3, 1)

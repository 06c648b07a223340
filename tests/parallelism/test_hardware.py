"""The table of GPUs and machines, and tables from users."""

from __future__ import annotations

import json

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.efficiency import of_family, of_gpu
from dtrain.parallelism.cluster.hardware import slowest
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.names import key

MINE = {
    "name": "mine",
    "memory": 48,
    "bandwidth": 1000.5,
    "flops": {"bf16": 200},
    "link": 64,
}


def refused(table: object) -> UsageError:
    text = table if isinstance(table, str) else json.dumps(table)
    with pytest.raises(UsageError) as caught:
        hardware().extended(text, "mine.json")
    return caught.value


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a100-80gb", "a100-80gb"),
        ("A100-80GB", "a100-80gb"),
        ("A100", "a100-80gb"),
        ("A100-SXM-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("nvidia_a100-sxm4-80gb", "a100-80gb"),  # Slurm with AutoDetect=nvml
        ("NVIDIA-H100-80GB-HBM3", "h100-80gb"),  # the device plugin of Kubernetes
        ("AMD_Instinct_MI300X_OAM", "mi300x"),
        ("A100-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("A800-80GB", "a800-80gb"),
        ("h100", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("H100 (95GB)", "h100-96gb"),
        ("H100-96GB", "h100-96gb"),
        ("H200", "h200"),
        ("B200", "b200"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("RTX 4090", "rtx-4090"),
        ("TPU v5p", "tpu-v5p"),
    ],
)
def test_names_that_people_and_drivers_use(written: str, name: str) -> None:
    assert hardware().gpu(written).name == name


@pytest.mark.parametrize(
    ("name", "precision", "tflops", "bandwidth", "link"),
    [
        ("v100", "fp16", 125, 900, 150),
        ("a100-40gb", "bf16", 312, 1555, 300),
        ("a100-80gb", "bf16", 312, 2039, 300),
        ("h100", "bf16", 989, 3350, 450),
        ("h100", "fp8", 1979, 3350, 450),
        ("h100", "tf32", 494, 3350, 450),
        ("h100", "fp32", 67, 3350, 450),
        ("h100-pcie", "bf16", 756, 2000, 63),
        ("h200", "fp8", 1979, 4800, 450),
        ("gb200", "fp8", 5000, 8000, 900),
        ("l4", "bf16", 121, 300, 31.5),
        ("mi300x", "fp8", 2614.9, 5300, 448),
        ("tpu-v5p", "bf16", 459, 2765, 600),
    ],
)
def test_figures_of_data_sheets(
    name: str, precision: str, tflops: float, bandwidth: float, link: float
) -> None:
    found = hardware().gpu(name)
    assert found.peak(precision) == tflops
    assert (found.bandwidth, found.link) == (bandwidth, link)


@pytest.mark.parametrize("found", hardware().gpus, ids=lambda found: found.name)
def test_every_entry_is_complete(found) -> None:
    assert found.source and found.family
    assert found.name == found.name.lower()
    # The driver never shows more memory than the data sheet, in GB or in GiB.
    assert found.memory <= 432
    # Half the width doubles the speed or does not change it.
    widths = [found.flops[p] for p in ("fp32", "tf32", "bf16", "fp8") if p in found.flops]
    assert widths == sorted(widths)
    assert found.link < found.bandwidth
    assert hardware().machine(found.machine).gpus_per_host >= 1


def test_names_are_unique() -> None:
    for rows in (hardware().gpus, hardware().machines):
        keys = [k for row in rows for k in {key(name) for name in (row.name, *row.aliases)}]
        assert len(keys) == len(set(keys))


def test_machines_hold_gpus_of_the_table() -> None:
    for machine in hardware().machines:
        assert hardware().gpu(machine.gpu), machine.name
    assert hardware().machine("DGX A100").network == 200
    assert hardware().machine("p4d").network_gbps == 400
    assert hardware().machine("p5").network_gbps == 3200


@pytest.mark.parametrize(
    ("gpu", "gpus", "memory"),
    [("h100", 8, 2048), ("h100", 16, 2048), ("h100", 2, 512), ("gaudi2", 8, 1024),
     ("tpu-v5e", 4, 192), ("rtx-4090", 1, 64)],
)  # fmt: skip
def test_a_part_of_a_machines_gpus_has_that_part_of_its_memory(
    gpu: str, gpus: int, memory: float
) -> None:
    assert hardware().cluster(hardware().gpu(gpu), gpus).host_memory == memory


def test_a_user_can_give_a_machine_more_memory() -> None:
    table = {"machines": [{"name": "workstation", "like": "workstation", "memory": 512}]}
    mine = hardware().extended(json.dumps(table), "mine.json")
    assert mine.cluster(mine.gpu("rtx-4090"), 4).host_memory == 512
    apu: dict[str, object] = {"name": "apu", "like": "mi300x", "shares_memory": True}
    assert not hardware().extended(json.dumps({"gpus": [apu]}), "mine.json").gpu("apu").has_host
    assert "must be true or false" in refused({"gpus": [{**apu, "shares_memory": 1}]}).message


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="'a100-80g' is not a GPU") as caught:
        hardware().gpu("a100-80g")
    assert "a100-80gb" in caught.value.hint and "`hardware=FILE`" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        hardware().gpu("rtx")
    assert "rtx-" in caught.value.hint
    with pytest.raises(UsageError):
        hardware().gpu("")
    with pytest.raises(UsageError) as caught:
        hardware().gpu("zzz")
    assert caught.value.hint == (
        "describe another with `hardware=FILE`; 'dtrain help models' lists those it knows"
    )


def test_an_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="v100-32gb does not support bf16") as caught:
        hardware().gpu("v100").peak("bf16")
    assert "fp16" in caught.value.hint


def test_a_cluster_gets_defaults_from_the_usual_machine() -> None:
    cluster = hardware().cluster(hardware().gpu("a100"), 64)
    assert (cluster.hosts, cluster.gpus_per_host, cluster.network) == (8, 8, 200)
    cluster = hardware().cluster(hardware().gpu("a100"), 64, gpus_per_host=4, network_gbps=400)
    assert (cluster.hosts, cluster.network) == (16, 50)
    assert hardware().cluster(hardware().gpu("a100"), 2).gpus_per_host == 2


@pytest.mark.parametrize(
    ("gpu", "per_host", "gbps"),
    [("h100", 8, 3200), ("h100", 4, 1600), ("a100", 1, 200), ("a100-pcie-80gb", 2, 200),
     ("rtx-4090", 1, 10), ("rtx-4090", 8, 10)],
)  # fmt: skip
def test_a_part_of_a_hosts_gpus_has_the_same_part_of_its_nics(
    gpu: str, per_host: int, gbps: float
) -> None:
    cluster = hardware().cluster(hardware().gpu(gpu), 4 * per_host, gpus_per_host=per_host)
    assert cluster.network * 8 == gbps


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (0, {}, "`gpus=0`"),
        (12, {}, "`gpus=12` does not fill hosts of 8"),
        (8, {"gpus_per_host": 0}, "`gpus_per_host=0`"),
        (8, {"network_gbps": 0}, "`network_gbps=0`"),
        (8, {"network_gbps": float("nan")}, "`network_gbps=nan`"),
    ],
)
def test_an_impossible_cluster_names_the_field(gpus, options, message) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        hardware().cluster(hardware().gpu("a100"), gpus, **options)
    assert caught.value.hint


def test_a_users_file_adds_gpus_and_machines() -> None:
    table = {
        "gpus": [MINE, {"name": "mine-wide", "like": "MINE", "memory": 96, "machine": "box"}],
        "machines": [{"name": "box", "gpu": "mine", "gpus_per_host": 2, "network_gbps": 80}],
    }
    extended = hardware().extended(json.dumps(table), "mine.json")
    mine = extended.gpu("Mine")
    assert (mine.memory, mine.bandwidth, mine.flops) == (48, 1000.5, {"bf16": 200})
    wide = extended.gpu("mine-wide")
    assert (wide.memory, wide.link, wide.source) == (96, 64, "like mine")
    assert extended.cluster(wide, 4).network == 10
    assert extended.gpu("a100") == hardware().gpu("a100")


def test_a_users_entry_overrides_a_name_and_an_alias() -> None:
    for name in ("a100-80gb", "A100"):
        table = {"gpus": [{"name": name, "like": "a100-80gb", "memory": 79.3}]}
        extended = hardware().extended(json.dumps(table), "mine.json")
        assert extended.gpu("a100" if name == "A100" else "a100-80gb").memory == 79.3
    assert hardware().gpu("a100").memory == 79.15


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ("{", ["mine.json:1:2"]),
        ("[]", ["mine.json", '"gpus"']),
        ({"gpu": []}, ["mine.json", '"gpus"']),
        ({"gpus": {}}, ["gpus", "list"]),
        ({"gpus": [3]}, ["gpus[0]", "object"]),
        ({"gpus": [{**MINE, "memory": "48 GB"}]}, ["gpus[0] (mine)", "memory", "'48 GB'"]),
        ({"gpus": [{**MINE, "memory": -1}]}, ["memory", "above 0"]),
        ({"gpus": [{**MINE, "flops": {"int4": 1}}]}, ["flops", "bf16"]),
        ({"gpus": [{**MINE, "flops": {"bf16": True}}]}, ["flops"]),
        ({"gpus": [{**MINE, "bandwith": 1}]}, ["bandwith is not a key"]),
        ({"gpus": [{"name": "x", "memory": 1}]}, ["bandwidth, flops, link are missing"]),
        ({"gpus": [{"like": "h100"}]}, ["name is missing"]),
        ({"gpus": [{"name": "x", "like": "h1000"}]}, ["like", "h1000"]),
        ({"gpus": [{**MINE, "machine": "nowhere"}]}, ["machine", "nowhere"]),
        (
            {"machines": [{"name": "m", "gpu": "x9", "gpus_per_host": 1, "network_gbps": 1}]},
            ["machines[0] (m)", "gpu", "x9"],
        ),
    ],
)
def test_an_invalid_file_is_reported_with_position_and_hint(
    table: object, parts: list[str]
) -> None:
    error = refused(table)
    assert all(part in error.message for part in parts), error.message
    assert error.hint


@pytest.mark.parametrize(
    ("name", "share", "fitted"),
    # Maximum achievable matmul FLOPS in 16 bits, in shares of the peak: stas00/ml-engineering;
    # the last nine from mag-/gpu_benchmark and xzwgit/gpu-flops-bench, whose A100 and H100 are
    # within 3 % of those of stas00/ml-engineering.
    [
        ("mi300x", 668.4 / 1300, "h100-80gb"),
        ("mi325x", 784.9 / 1300, "h100-80gb"),
        ("mi250x", 147.0 / 191.5, "h100-80gb"),
        ("mi355x", 1565.0 / 2516.6, "h100-80gb"),
        ("gaudi3", 1288.8 / 1835, "a100-80gb"),
        ("a100-pcie-80gb", 252.9 / 312, "a100-80gb"),
        ("rtx-6000-ada", 278.5 / 364.2, "a100-80gb"),
        ("a10g", 69.7 / 70, "a100-80gb"),
        ("l40s", 252.0 / 362, "a100-80gb"),
        ("h100-pcie-80gb", 499.5 / 756, "h100-80gb"),
        ("h100-nvl", 488.5 / 835, "h100-80gb"),
        ("v100-16gb", 96.1 / 125, "a100-80gb"),
        ("v100-32gb", 94.0 / 125, "a100-80gb"),
        ("rtx-5090", 254.0 / 209.5, "a100-80gb"),
        ("rtx-pro-6000", 457.6 / 503.8, "a100-80gb"),
    ],
)
def test_products_are_as_fast_as_measured(name: str, share: float, fitted: str) -> None:
    measured = {"h100-80gb": 794.5 / 989, "a100-80gb": 271.2 / 312}
    assert hardware().gpu(name).sustained == pytest.approx(share / measured[fitted], abs=0.01)
    assert (
        of_family(hardware().gpu(name).family).gemm == of_family(hardware().gpu(fitted).family).gemm
    )


def test_a_gpu_with_other_power_or_products_than_a_measured_one() -> None:
    changes: dict[str, dict[str, object]] = {
        "capped": {"watts": 575 / 8},
        "half": {"watts": 575 / 2, "flops": {"bf16": 209.5 / 2}},
        "more": {"memory": 40},
    }
    entries = [{"name": name, "like": "rtx-5090", **one} for name, one in changes.items()]
    extended = hardware().extended(json.dumps({"gpus": entries}), "mine.json")
    capped, half, more = (extended.gpu(name).sustained for name in changes)
    assert capped == pytest.approx(hardware().gpu("rtx-5090").sustained / 2)
    assert half == pytest.approx(hardware().gpu("rtx-5090").sustained)
    assert more == pytest.approx(hardware().gpu("rtx-5090").sustained)


def test_a_gb300_is_as_much_faster_as_its_power_limit_is_higher() -> None:
    assert hardware().gpu("gb300").sustained == pytest.approx(1400 / 1200, abs=0.01)


def test_products_run_at_the_clock_that_the_power_allows() -> None:
    a30, a40 = (of_gpu(hardware().gpu(name)).gemm for name in ("a30", "a40"))
    # 165 W for 165 TFLOP/s, and 300 W for 149.7.
    assert a30 / a40 == pytest.approx((165 / 165 * 149.7 / 300) ** (1 / 3))
    assert of_gpu(hardware().gpu("h100")) == of_family("hopper")
    assert of_gpu(hardware().gpu("rtx-3090")).gemm == pytest.approx(0.95)
    # What is measured, or not known, is as it is.
    assert of_gpu(hardware().gpu("mi300x")) == of_family("cdna")
    assert of_gpu(hardware().gpu("tpu-v5p")) == of_family("tpu")


def test_several_kinds_of_gpus_are_as_slow_and_as_small_as_the_least() -> None:
    kinds = [hardware().gpu("h100"), hardware().gpu("a100-40gb"), hardware().gpu("v100-16gb")]
    slow = slowest(kinds)
    assert (slow.family, slow.flops) == ("volta", {"fp16": 125, "fp32": 15.7})
    assert (slow.memory, slow.link) == (
        hardware().gpu("v100-16gb").memory,
        hardware().gpu("v100-16gb").link,
    )
    assert slowest([hardware().gpu("h100"), hardware().gpu("a100")]).memory == min(
        hardware().gpu("h100").memory, hardware().gpu("a100").memory
    )
    assert slowest(kinds[:1]) == kinds[0]
    # An MI300X has the higher peak, and an H100 sustains more.
    mixed = slowest([hardware().gpu("h100"), hardware().gpu("mi300x")])
    assert mixed.name == "mi300x"
    assert mixed.flops["bf16"] == hardware().gpu("mi300x").flops["bf16"]
    # What the one sustains in 16 bits, and the other in fp32.
    pair = slowest([hardware().gpu("h100-pcie-80gb"), hardware().gpu("h100-nvl")])
    assert pair.flops["fp32"] * pair.sustained == pytest.approx(
        min(
            one.flops["fp32"] * one.sustained
            for one in (hardware().gpu("h100-pcie-80gb"), hardware().gpu("h100-nvl"))
        )
    )
    with pytest.raises(UsageError, match="tpu-v4 and v100-16gb have no precision in common"):
        slowest([hardware().gpu("tpu-v4"), hardware().gpu("v100-16gb")])

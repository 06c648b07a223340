"""Measurements of the user's cluster replace the defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster import calibration
from dtrain.parallelism.cluster.efficiency import AMPERE
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.collectives import Group
from dtrain.parallelism.cost.layer import Kernels
from dtrain.parallelism.cost.products import Product
from dtrain.parallelism.model.models import model
from dtrain.runtime.layout import Layout

GPU = hardware().gpu("a100-80gb")
CLUSTER = GpuCluster(GPU, 64, 8, 200.0)


def read(**table: Any) -> Any:
    return calibration.read(json.dumps(table), "my.json", AMPERE, GPU, CLUSTER.network)


def test_a_calibration_recovers_known_matrix_product_constants() -> None:
    truth = replace(AMPERE, gemm=0.61, gemm_half=2.5e9)
    kernels = Kernels(truth, CLUSTER, model("llama-3-8b"), Layout(), Assumptions())
    rows = []
    for m, k, n in ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 28672)):
        product = Product(m, k, n)
        tflops = product.flop / kernels.product_seconds(product) / 1e12
        rows.append({"m": m, "k": k, "n": n, "tflops": tflops})
    found = read(gemm=rows)
    assert found.gemm == pytest.approx(truth.gemm, rel=1e-6)
    assert found.gemm_half == pytest.approx(truth.gemm_half, rel=1e-6)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_a_calibration_recovers_known_network_constants(kind: str) -> None:
    truth = replace(AMPERE, link=0.5, latency=70e-6, network=0.4, network_step=90e-6)
    rows = [
        {"kind": kind, "ranks": 8 * hosts, "hosts": hosts, "bytes": size,
         "seconds": getattr(Group(CLUSTER, truth, 8 * hosts, 1), kind)(size)}
        for hosts in (1, 8)
        for size in (1 << 20, 1 << 24, 1 << 28)
    ]  # fmt: skip
    found = read(collectives=rows)
    for name in ("link", "latency", "network", "network_step"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    inside = read(collectives=rows[:3])
    assert (inside.network, inside.network_step) == (AMPERE.network, AMPERE.network_step)


def test_collectives_of_one_size_change_only_the_bandwidth() -> None:
    seconds = Group(CLUSTER, replace(AMPERE, link=0.5), 8, 1).all_gather(1e8)
    row = {"kind": "all_gather", "ranks": 8, "hosts": 1, "bytes": 1e8, "seconds": seconds}
    found = read(collectives=[row, row])
    assert found.link == pytest.approx(0.5)
    assert found.latency == AMPERE.latency


@pytest.mark.parametrize("groups", [(2,), (8,), (2, 4, 8)])
def test_gpus_of_a_mesh_measure_the_links_that_they_have(groups: tuple[int, ...]) -> None:
    mesh = hardware().gpu("mi300x")
    truth = replace(AMPERE, link=0.5)
    rows = [
        {"kind": "all_gather", "ranks": ranks, "hosts": 1, "bytes": size,
         "seconds": Group(GpuCluster(mesh, 8, 8, 200.0), truth, ranks, 1).all_gather(size)}
        for ranks in groups
        for size in (1e8, 1e9)
    ]  # fmt: skip
    found = calibration.read(json.dumps({"collectives": rows}), "my.json", AMPERE, mesh, 200.0)
    assert found.link == pytest.approx(0.5, rel=0.02)


def test_a_device_without_16_bits_is_measured_in_what_it_has() -> None:
    narrow = replace(GPU, flops={"fp8": 100.0})
    text = json.dumps({"gemm": [{"m": 8192, "k": 8192, "n": 8192, "tflops": 50.0}]})
    found = calibration.read(text, "my.json", AMPERE, narrow, CLUSTER.network)
    assert 0.5 < found.gemm < 0.6


def test_products_of_one_size_change_only_the_plateau() -> None:
    found = read(gemm=[{"m": 4096, "k": 4096, "n": 4096, "tflops": 250.0}])
    assert found.gemm > AMPERE.gemm
    assert found.gemm_half == AMPERE.gemm_half


def test_constants_override_fitted_values() -> None:
    rows = [{"m": 4096, "k": 4096, "n": 4096, "tflops": 250.0}]
    assert read(gemm=rows, constants={"gemm": 0.5, "attention": 0.3}).gemm == 0.5


def test_an_empty_calibration_changes_nothing() -> None:
    assert read(schema=1) == AMPERE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"my.json:1:2: not JSON"),
        ("[]", r"my.json: holds a list, not an object"),
        ('{"gem": []}', r"my.json: no such part: gem"),
        ('{"schema": 2}', r"my.json: schema 2 is not 1"),
        ('{"gemm": {}}', r"my.json: gemm: must be a list, not an object"),
        ('{"gemm": [1]}', r"my.json: gemm\[0\]: a number, not an object"),
        ('{"gemm": [{"m": 1, "k": 1, "n": 1}]}', r"my.json: gemm\[0\]: no tflops"),
        ('{"gemm": [{"m": 0, "k": 1, "n": 1, "tflops": 1}]}', r"m is 0, not a positive number"),
        ('{"gemm": [{"m": true, "k": 1, "n": 1, "tflops": 1}]}', r"m is True, not a positive"),
        (
            '{"collectives": [{"kind": "x", "ranks": 8, "hosts": 1, "bytes": 1, "seconds": 1}]}',
            r"my.json: collectives\[0\]: kind is 'x'",
        ),
        (
            '{"collectives": [{"kind": "all_gather", "ranks": 1, "hosts": 1, "bytes": 1, "seconds": 1}]}',  # noqa: E501
            r"at least two ranks",
        ),
        ('{"constants": {"gemms": 1}}', r"my.json: constants: no constant 'gemms'"),
        ('{"constants": {"gemm": -1}}', r"gemm is -1, not a positive number"),
        ('{"constants": {"gemm": Infinity}}', r"Infinity is not a number"),
    ],
)
def test_invalid_files(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        calibration.read(text, "my.json", AMPERE, GPU, CLUSTER.network)

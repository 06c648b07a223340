"""Impossible requests are refused with the option, the reason and a value that works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

M = ("--model-size", "100B")


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        ((), "no model", "--model-size 100B"),
        ((*M, "--model", "llama-3-70b"), "--model-size and --model each", "keep one"),
        ((*M, "--layers", "80"), "--model-size and --layers each", "keep one"),
        (("--layers", "80"), "--layers requires --hidden", "--layers and --hidden"),
        (("--model-size", "lots"), "'lots'", "350M"),
        (("--model", "lama-3-70b"), "lama-3-70b", "llama-3-70b"),
        (("--model-config", "nowhere.json"), "there is no file 'nowhere.json'", "config.json"),
        ((*M, "--hardware", "nowhere.json"), "there is no file", "like"),
        ((*M, "--calibrate", "nowhere.json"), "there is no file", "--bandwidth"),
        ((*M, "--tensor", "7"), "--tensor 7 does not divide 64 GPUs", "1, 2, 4, 8"),
        ((*M, "--tensor", "32"), "80 heads", "1, 2, 4, 8 or 16"),
        ((*M, "--tensor", "0"), "--tensor 0", "at least 1"),
        ((*M, "--failure-rate", "4"), "--failure-rate is for the days", "--tokens"),
        ((*M, "--tokens", "1T", "--storage-gbs", "nan"), "--storage-gbs nan", "from 1e-15"),
        ((*M, "--tokens", "1T", "--restart-minutes", "inf"), "--restart-minutes inf", "to 1e+15"),
        ((*M, "--tokens", "1T", "--failure-rate", "1e-320"), "is not possible", "from 1e-15"),
        ((*M, "--price-per-gpu-hour", "2"), "--price-per-gpu-hour is for the days", "--tokens"),
        ((*M, "--tensor", "8", "--pipeline", "16"), "= 128", "--pipeline 1, 2, 4 or 8"),
        ((*M, "--tensor", "8", "--pipeline", "8", "--data", "2"), "= 128", "--data 1"),
        (
            (*M, "--pipeline", "8", "--virtual-pipeline", "3", "--backend", "runtime"),
            "pieces do not divide the 80 layers",
            "--backend megatron",
        ),
        ((*M, "--pipeline", "1", "--virtual-pipeline", "2"), "pipeline is 1", "set --pipeline to"),
        ((*M, "--data", "64", "--global-batch", "100"), "100 sequences", "--global-batch 128"),
        ((*M, "--data", "2", "--global-batch", "1"), "the batch of 1 sequence", "--data 1"),
        ((*M, "--data", "64", "--micro-batch", "3"), "--micro-batch 3", "1, 2, 4, 8 or 16"),
        ((*M, "--expert", "4"), "no experts", "leave it out"),
        ((*M, "--context", "64", "--seq-len", "96"), "--context 64", "1, 2, 4, 8 or 16"),
        ((*M, "--sharding", "zero1"), "zero1", "ZeRO-1 is optimizer"),
        ((*M, "--recompute", "some"), "some", "selective"),
        ((*M, "--tensor", "1", "--sequence-parallel"), "--tensor is 1", "set --tensor to"),
        ((*M, "--tensor", "8", "--pipeline", "8", "--sharding", "full"), "one data rank", ""),
        ((*M, "--gpus", "60"), "hosts of 8", "56 or 64"),
        ((*M, "--gpus", "1000000000"), "--gpus 1000000000", "at most 1,000,000"),
        ((*M, "--gpus", "8" + "0" * 40), "--gpus: a number of 41 digits", "at most"),
        ((*M, "--gpus-per-host", "1000000000"), "--gpus-per-host 1000000000", "at most"),
        ((*M, "--tensor", "1" + "0" * 400), "--tensor: a number of 401 digits", "at most"),
        ((*M, "--global-batch", "1000000000000"), "global batch", "at most"),
        (("--layers", "720720", "--hidden", "4096"), "layers is 720720", "at most 2,000"),
        (("--layers", "8", "--hidden", "1" + "0" * 400), "--hidden: a number of", "at most"),
        ((*M, "--gpu", "a1000"), "a1000", "--hardware"),
        ((*M, "--precision", "fp8"), "fp8", "--precision bf16, fp16, tf32 or fp32"),
        ((*M, "--precision", "int4"), "int4", "bf16"),
        ((*M, "--global-batch", "0"), "--global-batch 0", "at least 1"),
        ((*M, "--seq-len", "0"), "--seq-len 0", "4096"),
        ((*M, "--vocab", "0"), "--vocab 0", "128256"),
        (("--layers", "8", "--hidden", "4096", "--vocab", "-1"), "--vocab -1", "128256"),
        ((*M, "--tokens", "many"), "--tokens 'many'", "1.5T"),
        ((*M, "--tokens", "1"), "less than one step, which has", "--global-batch"),
        ((*M, "--tokens", "1e30"), "--tokens '1e30' is too many", "at most"),
        (("--layers", "2", "--hidden", "4097", "--heads", "32"), "--heads 32", "--hidden 4096,"),
        ((*M, "--top", "0"), "--top 0", "at least 1"),
        ((*M, "--network-gbps", "-1"), "--network-gbps -1", "1600"),
        ((*M, "--rack-gbps", "400"), "--rack-hosts", "both"),
        ((*M, "--rack-hosts", "8" * 401), "--rack-hosts: a number of 401 digits", "at most"),
        ((*M, "--rack-hosts", "4", "--rack-gbps", "0"), "--rack-gbps 0", "400"),
        ((*M, "--framework", "jax"), "jax", "torch or tensorflow"),
        ((*M, "--framework", "tensorflow", "--tensor", "8"), "--tensor", "torch"),
        ((*M, "nowhere.yaml"), "nowhere.yaml", ""),
        ((*M, "--set", "cluster.gpus=4"), "--set needs a cluster file", "add FILE"),
        ((*M, "--hardware", "broken.json"), "broken.json:1:2", "like"),
        ((*M, "--calibrate", "broken.json"), "broken.json:1:2", "gemm"),
        ((*M, "--model-config", "broken.json"), "each describe", "keep one"),
        (("--model-config", "broken.json"), "broken.json:1:2", "config.json"),
    ],
)
def test_usage_errors(
    dtrain: Any, tmp_path: Path, argv: tuple[str, ...], message: str, hint: str
) -> None:
    (tmp_path / "broken.json").write_text("{oops")
    done = dtrain("plan", *argv)
    assert done.returncode == 2, done
    assert done.stdout == ""
    error, _, advice = done.stderr.partition("hint: ")
    assert message in error
    assert hint in advice
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_binary_and_hostile_files(dtrain: Any, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "null.json").write_text("null")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for option in ("--hardware", "--calibrate", "--model-config"):
        size = () if option == "--model-config" else M
        for name in ("binary", "list.json", "null.json", "deep.json", "."):
            done = dtrain("plan", *size, option, name)
            assert done.returncode == 2, (option, name, done)
            assert "Traceback" not in done.stderr
            assert name in done.stderr


def cluster(tmp_path: Path, **sections: Any) -> str:
    document: dict[str, Any] = {
        "cluster": {"hosts": "gpu[01-04]", "gpus": 8, "gpu": "h100-80gb"},
        "job": {"framework": "torch", "script": "train.py"},
    }
    for name, values in sections.items():
        document[name] |= values
        document[name] = {key: one for key, one in document[name].items() if one is not None}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document))
    return "cluster.yaml"


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
def test_errors_in_a_cluster_file_have_a_position_and_a_hint(
    plan: Callable[..., dict[str, Any]], tmp_path: Path, precision: str
) -> None:
    training = {"global_batch": 96, "seq_len": 2048, "precision": precision}
    file = cluster(tmp_path, cluster={"network": {"gbps": 400}}, job={"training": training})
    found = plan("--model-size", "7B", file, "--set", "cluster.network.gbps=800")
    where = found["cluster"]
    assert (where["gpu"], where["gpus"], where["gpus_per_host"]) == ("h100-80gb", 32, 8)
    assert where["network_gbps"] == 800
    assert "cluster.yaml" in where["source"]
    best = found["layouts"][0]
    assert (best["global_batch"], best["precision"]) == (96, precision)
    assert found["model"]["seq_len"] == 2048


def test_options_override_the_file_with_a_note(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = cluster(tmp_path, job={"training": {"global_batch": 96, "seq_len": 2048}})
    found = plan(
        "--model-size", "7B", file, "--gpu", "h200", "--gpus", "64", "--seq-len", "4096",
        "--global-batch", "128",
    )  # fmt: skip
    assert (found["cluster"]["gpu"], found["cluster"]["gpus"]) == ("h200", 64)
    assert found["model"]["seq_len"] == 4096
    assert found["layouts"][0]["global_batch"] == 128
    notes = " ".join(found["notes"])
    assert "--gpu h200 overrides h100-80gb of cluster.yaml" in notes
    assert "--gpus 64 overrides 32 of cluster.yaml" in notes


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        ({"gpus": 0}, "have no GPUs", "cluster.gpus"),
        ({"gpus": 0}, "have no GPUs", "add --probe to measure the CPUs"),
        ({"gpu": "z9000"}, "z9000", ""),
        ({"overrides": {"gpu02": {"gpus": 4}}}, "4 and 8 GPUs", "--gpus-per-host 4"),
    ],
)
def test_files_that_cannot_be_planned_for(
    dtrain: Any, tmp_path: Path, changed: dict[str, Any], message: str, hint: str
) -> None:
    file = cluster(tmp_path, cluster=changed)
    done = dtrain("plan", "--model-size", "7B", file)
    assert done.returncode == 2
    assert message in done.stderr
    assert hint in done.stderr


def test_a_file_that_does_not_name_its_gpu(dtrain: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "cluster: {hosts: [a, b], gpus: 8}\njob: {framework: torch, script: train.py}\n"
    )
    done = dtrain("plan", "--model-size", "7B", "c.yaml")
    assert done.returncode == 2
    assert "--gpu" in done.stderr
    assert dtrain("plan", "--model-size", "7B", "c.yaml", "--gpu", "h100").returncode == 0


def test_hosts_with_different_gpus(
    plan: Callable[..., dict[str, Any]], dtrain: Any, tmp_path: Path
) -> None:
    seven = ("--model-size", "7B")
    slow = plan(*seven, cluster(tmp_path, cluster={"gpu": "a100-40gb"}))
    mixed = {"overrides": {"gpu02": {"gpu": "a100-40gb"}}}
    found = plan(*seven, cluster(tmp_path, cluster=mixed))
    note, *notes = found["notes"]
    assert note.startswith("cluster.yaml has a100-40gb and h100-80gb: planned with the speed")
    assert found | {"notes": notes} == slow
    same = {"gpu": "h100", "overrides": {"gpu02": {"gpu": "h100-80gb"}}}
    (network, *_) = plan(*seven, cluster(tmp_path, cluster=same))["notes"]
    assert "typical of h100-80gb" in network
    only = {"gpu": None, "overrides": {"gpu02": {"gpu": "a100"}}}
    done = dtrain("plan", *seven, cluster(tmp_path, cluster=only))
    assert done.returncode == 2
    assert "does not name the GPU of gpu[01,03-04]" in done.stderr


def test_a_gpu_from_the_users_table(plan: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    table = {"gpus": [{"name": "my-gpu", "like": "h100-80gb", "memory": 200.0}]}
    (tmp_path / "table.json").write_text(json.dumps(table))
    found = plan("--model-size", "7B", "--hardware", "table.json", "--gpu", "my-gpu", "--gpus", "8")
    assert found["cluster"]["gpu_memory_gib"] == 200

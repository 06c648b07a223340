"""Invalid JSON files are refused quickly, without an internal error."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster import calibration
from dtrain.parallelism.cluster.efficiency import AMPERE
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.constraints import check_sizes
from dtrain.parallelism.model.huggingface import shape_from_config

GPU = hardware().gpu("a100-80gb")
CASES = 500


def read_config(text: str) -> None:
    shape = shape_from_config(text, "file")
    check_sizes(shape, 8)
    assert shape.attention_parameters >= 0


def read_hardware(text: str) -> None:
    hardware().extended(text, "file")


def read_calibration(text: str) -> None:
    calibration.read(text, "file", AMPERE, GPU, 25.0)


GOOD: dict[Callable[[str], None], dict[str, Any]] = {
    read_config: {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
        "max_position_embeddings": 128, "hidden_act": "silu", "layer_types": ["full_attention"],
        "mlp_only_layers": [0], "attn_config": {"kv_n_heads": 2},
        "shared_expert_intermediate_size": 4,
        "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "q_lora_rank": 8,
        "attention_dropout": 0.1, "tie_word_embeddings": False, "_name_or_path": "a/b",
    },
    read_hardware: {
        "gpus": [{"name": "x", "like": "h100-80gb", "memory": 95.0, "flops": {"bf16": 900},
                  "aliases": ["y"], "machine": "m"}],
        "machines": [{"name": "m", "gpu": "x", "gpus_per_host": 8, "network_gbps": 400}],
    },
    read_calibration: {
        "schema": 1,
        "gemm": [{"m": 64, "k": 64, "n": 64, "tflops": 100.0},
                 {"m": 4096, "k": 4096, "n": 4096, "tflops": 200.0}],
        "collectives": [{"kind": "all_reduce", "ranks": 8, "hosts": 2, "bytes": 1e6,
                         "seconds": 1e-3}],
        "constants": {"attention": 0.45},
    },
}  # fmt: skip
HOSTILE = (
    None, True, False, 0, -1, 1, 1e-320, 1e-30, 1e30, 1e308, 10**29, 2**63, 0.5, "", "x", "\ud800",
    "\x1b[2J", [], [[]], {}, {"a": {}}, [None], ["full_attention", {}], [0, [1]], {"bf16": 1e-320},
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in ``value`` with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


@pytest.mark.parametrize("read", GOOD)
def test_a_file_with_values_of_all_kinds(read: Callable[[str], None]) -> None:
    chance = random.Random(10)
    read(json.dumps(GOOD[read]))
    for _ in range(CASES):
        document = copy.deepcopy(GOOD[read])
        for _ in range(chance.randint(1, 3)):
            container, key = chance.choice([*places(document)] or [({}, "")])
            container[key] = copy.deepcopy(chance.choice(HOSTILE))
            if chance.random() < 0.2:
                del container[key]
        try:
            read(json.dumps(document))
        except UsageError as error:
            assert error.message.startswith("file")


@pytest.mark.parametrize("read", GOOD)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("9" * 10_000, "a number of 10000 digits is too long"),
        ("-" + "9" * 10_000, "a number of 10001 digits is too long"),
        ("1e999", "the number 1e999 is too large"),
        ("NaN", "NaN is not a number"),
        ("-Infinity", "-Infinity is not a number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_value_without_limits(read: Callable[[str], None], value: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(f'{{"schema": {value}}}')
    assert caught.value.message.startswith("file:")
    assert caught.value.hint

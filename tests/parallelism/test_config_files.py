"""Files of Transformers 5, with the parameters of the models that it makes of them.

``data/config_files.json`` has the defaults of the model types of Transformers 5.23, which are the
sizes of published models, or values near them, in the format that it writes and in the one of the
published files. The numbers of parameters are those of its modules on PyTorch's device ``meta``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.model.huggingface import shape_from_config
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape

FILES = json.loads((Path(__file__).parent / "data" / "config_files.json").read_text())


def read(config: dict[str, Any]) -> Shape:
    return shape_from_config(json.dumps(config), "config.json")


@pytest.mark.parametrize("name", FILES)
def test_the_parameters_are_those_of_the_modules(name: str) -> None:
    file = FILES[name]
    assert read(file["config"]).parameters == pytest.approx(file["parameters"], rel=3e-4)


def test_a_layer_may_have_heads_of_another_size() -> None:
    whole = read(FILES["gemma-4, dense"]["config"])
    assert [whole.pattern[place].head_size for place in (0, 5)] == [256, 512]
    experts = read(FILES["gemma-4, with experts"]["config"])
    assert (experts.experts_per_token, experts.shared_experts) == (8, 3)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("glm-5", "glm-5, as published"),
        ("kimi-linear-48b-a3b", "kimi-linear-48b-a3b, as published"),
        ("ling-3.0-flash", "ling-3.0-flash, without layer_types"),
        ("lfm2, with convolutions", "lfm2, by full_attn_idxs"),
        ("gemma-4, dense", "gemma-4, as published"),
        ("deepseek-v4-flash", "deepseek-v4-flash, as published"),
    ],
)
def test_both_formats_have_the_same_layers(name: str, other: str) -> None:
    assert read(FILES[name]["config"]).pattern == read(FILES[other]["config"]).pattern


def test_sparse_attention_has_a_limit_of_keys() -> None:
    assert {layer.attended for layer in read(FILES["glm-5"]["config"]).pattern} == {2048}


def test_keys_of_all_layers_that_attend_to_everything_may_be_fewer() -> None:
    published = FILES["gemma-4, as published"]["config"] | {"num_global_key_value_heads": 1}
    fewer = read(published | {"attention_k_eq_v": True})
    assert [fewer.pattern[place].kv_heads for place in (0, 5)] == [4, 1]
    assert read(published).pattern[5].kv_heads == 4


@pytest.mark.parametrize(("factor", "width"), [(None, 8192), (1.5, 12288), (0.99, 8192)])
def test_the_width_of_lfm2s_mlp_is_adjusted(factor: float | None, width: int) -> None:
    config = FILES["lfm2, with convolutions"]["config"] | {"block_ffn_dim_multiplier": factor}
    assert read(config).pattern[0].ffn_hidden == width


def test_only_layers_with_attention_have_heads_of_another_size() -> None:
    config = FILES["bamba-9b"]["config"]
    own = {str(place): {"num_key_value_heads": 4} for place in (8, 9)}
    shape = read({**config, "per_layer_config": {**own, "9" * 5000: {"head_dim": 1}}})
    assert [shape.pattern[place].kv_heads for place in (8, 9, 18)] == [0, 4, 8]


def test_more_dense_layers_than_there_are() -> None:
    config = FILES["ernie-4.5-21b-a3b"]["config"]
    shape = read({**config, "moe_layer_start_index": 99})
    assert shape.dense_layers == shape.layers
    assert shape.parameters == shape.active_parameters


def test_older_files_of_deepseek_v4() -> None:
    config = FILES["deepseek-v4-flash"]["config"]
    shape = read(config)
    # DeepSeek-V3's key, which the model does not read.
    with_dense = read({**config, "first_k_dense_replace": 3})
    assert with_dense.pattern == shape.pattern
    assert all(kind.moe_layers == 1 for kind in with_dense.pattern)
    coarse = read({**config, "compress_rate_csa": 8})
    assert coarse == read({**config, "compress_rates": {"compressed_sparse_attention": 8}})
    assert coarse != shape


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma-4, dense", "hidden_size_per_layer_input", 256, "embeddings of each layer"),
        ("gemma-4, dense", "per_layer_config", {"05": {"rank": 1}}, "head_dim and num_key_value"),
        ("gemma-4, dense", "per_layer_config", {"05": 512}, "head_dim and num_key_value"),
        ("gemma-4, dense", "per_layer_config", {"05": {"head_dim": 0}}, "head_dim is missing"),
        ("gemma-4, dense", "per_layer_config", {"05": {"num_key_value_heads": 3}}, "3 key and"),
        ("glm-5", "hc_mult", 4, "several residual streams"),
        ("deepseek-v4-flash", "layer_types", ["full_attention"] * 43, "layer_types must have"),
        ("deepseek-v4-flash", "layer_types", ["sliding_attention"], "layer_types must have"),
        ("deepseek-v4-flash", "hc_mult", None, "hc_mult is missing"),
        ("deepseek-v4-flash", "o_groups", 7, "7 o_groups do not divide"),
        ("lfm3", "conv_L_cache", None, "conv_L_cache is missing"),
        ("kimi-linear-48b-a3b", "linear_head_dim", None, "linear_head_dim"),
    ],
)
def test_a_file_without_a_shape_is_refused(name: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read({**FILES[name]["config"], key: value})


@pytest.mark.parametrize("key", ["attn_layer_indices", "full_attn_idxs", "layers_block_type"])
@pytest.mark.parametrize("value", ["x", 3, {}, [None], [[1]], 10**9])
def test_a_list_of_layers_may_be_anything(key: str, value: Any) -> None:
    try:
        read({**FILES["bamba-9b"]["config"], key: value})
    except UsageError as error:
        assert "config.json: " in error.message


AGREEING = (
    "glm-5", "ling-3.0-flash", "minimax-m3", "ernie-4.5-21b-a3b", "deepseek-v4-flash",
    "nemotron-3-super",
)  # fmt: skip


@pytest.mark.parametrize("name", AGREEING)
def test_the_table_of_models_agrees(name: str) -> None:
    known, shape = model(name), read(FILES[name]["config"])
    assert known.parameters == pytest.approx(shape.parameters, rel=1e-4)
    assert known.active_parameters == pytest.approx(shape.active_parameters, rel=1e-4)

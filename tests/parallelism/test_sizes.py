"""Shapes from a parameter count, and from the options for single sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.diagnostics import UsageError
from dtrain.parallelism.model.sizes import parse_count, shape_for_size, shape_from_sizes
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100B", 100 * 10**9),
        ("1.5T", 15 * 10**11),
        ("350M", 350 * 10**6),
        ("350m", 350 * 10**6),
        ("7e9", 7 * 10**9),
        ("1.1B", 11 * 10**8),
        ("0.5b", 5 * 10**8),
        (".5b", 5 * 10**8),
        ("20k", 20_000),
        ("124439808", 124439808),
        ("1_000_000", 10**6),
        ("1,000,000", 10**6),
        (" 15 T ", 15 * 10**12),
        ("10.0", 10),
    ],
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "100X", "nan", "inf", "8x7B", "1e999", "1..5B"])
def test_an_invalid_count_names_the_field_and_the_format(text: str) -> None:
    with pytest.raises(UsageError, match="`tokens`") as caught:
        parse_count(text, "tokens")
    assert "1.5T" in caught.value.hint


@pytest.mark.parametrize("text", ["0", "0B", "0.0", "-1B", "-.5T", "1.5", "1.0001K"])
def test_a_count_is_an_integer_above_zero(text: str) -> None:
    with pytest.raises(UsageError, match="not a whole number above 0"):
        parse_count(text)


@given(st.floats(7, 13).map(lambda power: 10**power))
def test_any_size_from_10m_to_10t_has_a_shape_that_divides(parameters: float) -> None:
    shape = shape_for_size(parameters)
    assert shape.parameters == pytest.approx(parameters, rel=0.02)
    assert shape.heads * shape.head_size == shape.hidden
    assert shape.heads % shape.kv_heads == 0
    assert shape.layers % 2 == 0
    if parameters > 1e8:
        assert shape.ffn_hidden % 256 == 0
    if shape.hidden >= 1024:
        assert shape.heads % 8 == 0
    if parameters >= 1e9:
        assert shape.layers % 4 == 0
        assert shape.head_size == 128
        assert shape.kv_heads == 8
        assert shape.parameters == pytest.approx(parameters, rel=0.01)
    if parameters >= 1e10:
        assert 70 <= shape.hidden / shape.layers <= 400
        assert 2.3 <= shape.ffn_hidden / shape.hidden <= 4.2


@given(st.floats(9, 13).map(lambda power: 10**power), st.sampled_from([32000, 50304, 256000]))
def test_another_vocabulary_keeps_the_model_size(parameters: float, vocab: int) -> None:
    shape = shape_for_size(parameters, vocab=vocab, seq_len=8192)
    assert (shape.vocab, shape.seq_len) == (vocab, 8192)
    assert shape.parameters == pytest.approx(parameters, rel=0.02)


def test_100b_is_near_the_well_known_shapes() -> None:
    shape = shape_for_size(100e9)
    assert shape.hidden == 10240
    assert 80 <= shape.layers <= 96
    assert shape.heads % 8 == 0


def test_layers_divide_into_the_stages_that_a_large_model_needs() -> None:
    # GPUs of 80 GB hold 1T in 16 stages of tensor 8, and 10T only in 256: 128 are too few.
    assert shape_for_size(1e12).layers % 16 == 0
    assert shape_for_size(10e12).layers % 256 == 0
    best = pose(PlanRequest(model_size="10T", gpu="h100", gpus=16_384, backend="megatron")).fastest(
        tensor=8, data=8, offload=False
    )
    assert best is not None
    assert (best.layout.pipeline, best.layout.sharding) == (256, "optimizer")
    assert best.speed.mfu > 0.25


def test_8b_is_llama_3() -> None:
    shape = shape_for_size(8e9)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (32, 4096, 32, 8)
    assert (shape.ffn_hidden, shape.vocab) == (14336, 128256)


@pytest.mark.parametrize(
    ("parameters", "options", "message", "hint"),
    [
        (7, {}, "`model_size=7`", "did you mean 7B?"),
        (1e5, {}, "`model_size=100000`", "`layers`"),
        (1e16, {}, "`model_size=1e\\+16`", "`layers`"),
        (math.nan, {}, "`model_size=nan`", "`layers`"),
        (1e7, {"vocab": 256000}, "`vocab` of 256000", "vocab"),
    ],
)
def test_impossible_sizes_are_refused_with_a_reason(
    parameters: float, options, message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        shape_for_size(parameters, **options)
    assert hint in caught.value.hint


def test_missing_sizes_get_usual_values() -> None:
    shape = shape_from_sizes(layers=32, hidden=4096)
    assert (shape.heads, shape.kv_heads, shape.head_size) == (32, 32, 128)
    assert (shape.ffn_hidden, shape.gated) == (11008, True)  # as in Llama 2 7B
    assert (shape.vocab, shape.seq_len) == (128256, 4096)


def test_sizes_by_option_recognize_gpt_3s_mlp() -> None:
    gpt = shape_from_sizes(layers=96, hidden=12288, heads=96, ffn_hidden=49152, vocab=50257)
    assert not gpt.gated
    grouped = shape_from_sizes(layers=96, hidden=12288, heads=96, kv_heads=8, ffn_hidden=49152)
    assert grouped.gated


def test_options_for_a_mixture_of_experts() -> None:
    shape = shape_from_sizes(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=32000, experts=8
    )
    assert shape.experts_per_token == 2
    assert shape.parameters == 46_702_792_704  # Mixtral 8x7B


@pytest.mark.parametrize(
    ("sizes", "message", "hint"),
    [
        ({"heads": 7}, "`heads=7` does not divide `hidden=4096`", "`heads=8`"),
        ({"heads": 30}, "`heads=30` does not divide `hidden=4096`", "`hidden=4080`"),
        ({"hidden": 4200, "heads": 32}, "does not divide `hidden=4200`", "`heads=35`"),
        ({"heads": 32, "kv_heads": 5}, "`kv_heads=5` does not divide `heads=32`", "`kv_heads=4`"),
        ({"heads": 8, "kv_heads": 16}, "`kv_heads=16` does not divide `heads=8`", "`kv_heads=8`"),
        ({"heads": 0}, "`heads=0`", "at least 1"),
        ({"layers": -2}, "`layers=-2`", "at least 1"),
        ({"hidden": 100}, "`hidden=100` does not divide into heads of 64", "`heads`"),
        ({"experts": 1}, "`experts=1`", "at least 2"),
        ({"experts_per_token": 2}, "`experts_per_token=2` without `experts`", "how many"),
        ({"experts": 4, "experts_per_token": 5}, "`experts_per_token=5` is not between", "2"),
    ],
)
def test_contradicting_sizes_name_their_fields(sizes, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        shape_from_sizes(**{"layers": 32, "hidden": 4096, **sizes})
    assert message in caught.value.message
    assert hint in caught.value.hint

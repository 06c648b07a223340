"""The table of well-known models."""

from __future__ import annotations

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.model.models import model, models
from dtrain.parallelism.names import key


@pytest.mark.parametrize("known", models(), ids=lambda known: known.name)
def test_parameters_are_within_one_percent_of_the_published(known) -> None:
    assert known.source
    assert known.shape.parameters == pytest.approx(known.parameters, rel=0.01)


@pytest.mark.parametrize(
    "known", [known for known in models() if known.active], ids=lambda known: known.name
)
def test_active_parameters_are_near_the_published(known) -> None:
    # Publishers round these to two digits, and only some count the input embedding.
    counts = (
        known.shape.active_parameters,
        (known.shape.active_parameters - known.shape.embedding_parameters),
    )
    assert min(abs(count / known.active - 1) for count in counts) < 0.03


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("dbrx", 131_596_523_520),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("gemma-2b", 2_506_172_416),
        ("phi-4", 14_659_507_200),
    ],
)
def test_parameters_without_small_extras_are_exact(name: str, parameters: int) -> None:
    # Counts of checkpoints. Other models have biases or norms that are not in the shape.
    assert model(name).parameters == parameters


@pytest.mark.parametrize("known", models(), ids=lambda known: known.name)
def test_every_shape_is_valid(known) -> None:
    shape = known.shape
    assert not shape.heads or shape.heads % shape.kv_heads == 0
    assert 0 <= shape.experts_per_token <= shape.experts
    assert bool(shape.experts) == bool(shape.experts_per_token)
    assert shape.dense_layers < shape.layers
    assert bool(shape.dense_layers) == bool(shape.dense_ffn_hidden)
    assert shape.active_parameters <= shape.parameters


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Llama-3-70B", "llama-3-70b"),
        ("llama3-70b", "llama-3-70b"),
        ("Llama-3.1-70B", "llama-3-70b"),
        ("meta-llama/Llama-3.1-405B", "llama-3.1-405b"),
        ("LLAMA2-13B", "llama-2-13b"),
        ("gpt3-175b", "gpt-3-175b"),
        ("Qwen/Qwen2.5-72B", "qwen2.5-72b"),
        ("DeepSeek V3", "deepseek-v3"),
        ("bloom", "bloom-176b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("google-t5/t5-base", "t5-base"),
    ],
)
def test_names_that_people_write(written: str, name: str) -> None:
    assert model(written).name == name


@pytest.mark.parametrize("name", ["Mistral-Small-Instruct-2409", "DeepSeek-R1-Distill-Llama-70B"])
def test_a_name_without_the_same_size_is_not_guessed(name: str) -> None:
    """The first has 22B parameters, and Mistral Small of 2501 has 24B."""
    with pytest.raises(UsageError, match="is not a model"):
        model(name)


def test_names_are_unique() -> None:
    keys = [k for known in models() for k in {key(n) for n in (known.name, *known.aliases)}]
    assert len(keys) == len(set(keys))


def test_an_unknown_name_suggests_the_nearest() -> None:
    meant = {
        "lama-3-70b": "llama-3-70b",
        "qwen25-7b": "qwen2.5-7b or qwen2-57b-a14b",
        "llama-70b": "llama-2-70b or llama-3-70b",
        "llama-3.1-70": "llama-3.1-70b",
        "lama3.1-8b-instruct": "llama-3.1-8b",
        "mixtral": "mixtral-8x7b or mixtral-8x22b",
    }
    for name, known in meant.items():
        with pytest.raises(UsageError, match=f"'{name}' is not a model") as caught:
            model(name)
        assert f"did you mean {known}?" in caught.value.hint


@pytest.mark.parametrize("name", ["whisper-large", "gpt-5", "bloom-3b", "falcon-11b", "sdxl"])
def test_other_models_and_sizes_are_not_suggested(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        model(name)
    assert "did you mean" not in caught.value.hint

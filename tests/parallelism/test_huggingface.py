"""Shapes from config.json files of Hugging Face models, with the keys of real files."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import fields
from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.model.huggingface import assumption, shape_from_config
from dtrain.parallelism.model.models import model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2_MOE = {
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
GEMMA = {
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "vocab_size": 256000,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
FALCON_7B = {
    "alibi": False,
    "bias": False,
    "hidden_size": 4544,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = {
    "hidden_size": 8192,
    "model_type": "falcon",
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "vocab_size": 65024,
}
BLOOM = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "model_type": "bloom",
    "n_embed": 14336,
    "hidden_size": 14336,
    "n_head": 112,
    "n_layer": 70,
    "seq_length": 2048,
    "vocab_size": 250880,
}
NEOX = {
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "tie_word_embeddings": False,
    "vocab_size": 50432,
}
OPT = {
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 8192,
    "hidden_size": 2048,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "vocab_size": 50272,
    "word_embed_proj_dim": 2048,
}
DBRX = {
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
    "d_model": 6144,
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "max_seq_len": 32768,
    "model_type": "dbrx",
    "n_heads": 48,
    "n_layers": 40,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
MPT = {
    "attn_config": {"attn_impl": "torch", "attn_pdrop": 0},
    "d_model": 4096,
    "expansion_ratio": 4,
    "max_seq_len": 2048,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "vocab_size": 50432,
}
GPT_OSS = {
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "sliding_window": 128,
    "vocab_size": 201088,
}
COHERE = {
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "model_type": "cohere",
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "vocab_size": 256000,
}
LLAMA4 = {
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
NEMOTRON = {
    "head_dim": 192,
    "hidden_act": "relu2",
    "hidden_size": 18432,
    "intermediate_size": 73728,
    "model_type": "nemotron",
    "num_attention_heads": 96,
    "num_hidden_layers": 96,
    "num_key_value_heads": 8,
    "vocab_size": 256000,
}
BERT = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 30522,
}
ESM2 = BERT | {
    "hidden_dropout_prob": 0.0,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "max_position_embeddings": 1026,
    "model_type": "esm",
    "num_attention_heads": 20,
    "num_hidden_layers": 33,
    "position_embedding_type": "rotary",
    "vocab_size": 33,
}
MODERNBERT = {
    "global_attn_every_n_layers": 3,
    "hidden_size": 1024,
    "intermediate_size": 2624,
    "local_attention": 128,
    "max_position_embeddings": 8192,
    "model_type": "modernbert",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "position_embedding_type": "absolute",
    "vocab_size": 50368,
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama-3-8b"),
        (GPT2, "gpt2"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN2_MOE, "qwen1.5-moe-a2.7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (DEEPSEEK_V2_LITE, "deepseek-v2-lite"),
        (GEMMA, "gemma-7b"),
        (GEMMA3_4B, "gemma-3-4b"),
        (FALCON_7B, "falcon-7b"),
        (FALCON_40B, "falcon-40b"),
        (BLOOM, "bloom-176b"),
        (NEOX, "gpt-neox-20b"),
        (OPT, "opt-1.3b"),
        (DBRX, "dbrx"),
        (MPT, "mpt-7b"),
        (GPT_OSS, "gpt-oss-120b"),
        (LLAMA4, "llama-4-scout"),
        (COHERE, "command-r"),
        (NEMOTRON, "nemotron-4-340b"),
        (BERT, "bert-large"),
    ],
)
def test_a_file_gives_the_shape_of_the_table(config: dict[str, Any], name: str) -> None:
    known = model(name)
    shape = read(config)
    shape = shape.with_lengths(known.seq_len, shape.vocab)
    for size in (field.name for field in fields(known)):
        if size not in ("name", "dropout"):
            assert getattr(shape, size) == getattr(known, size), size


def test_a_type_that_is_not_known_has_a_note() -> None:
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256,
        "intermediate_size": 128,
    }  # fmt: skip

    def note(**keys: Any) -> str:
        return assumption(json.dumps({**sizes, **keys}), "config.json")

    assert note(model_type="llama") == note(model_type="qwen3") == ""
    new = note(model_type="new", hidden_act="relu")
    assert "config.json: the model_type 'new' is not known" in new
    assert "causal attention, an MLP of two matrices and a separate output layer" in new
    assert "config.json has no model_type" in note()


def read(config: dict[str, Any]) -> Any:
    return shape_from_config(json.dumps(config), "config.json")


def test_training_sequences_are_shorter_than_the_longest_context() -> None:
    assert read(LLAMA).seq_len == 8192
    assert read(GPT2).seq_len == 1024


def test_dropout_comes_from_the_file() -> None:
    assert read(GPT2).dropout
    assert not read(GPT2 | {"resid_pdrop": 0.0}).dropout
    assert read({k: v for k, v in GPT2.items() if k != "resid_pdrop"}).dropout
    assert not read(LLAMA).dropout


def test_the_name_is_the_repositorys() -> None:
    assert read(LLAMA | {"_name_or_path": "meta-llama/Llama-3.1-8B"}).name == "Llama-3.1-8B"
    assert read(LLAMA).name == "llama"


def test_an_unknown_type_is_read_by_its_keys() -> None:
    assert read(LLAMA | {"model_type": "new"}).gated
    assert not read(LLAMA | {"model_type": "new", "hidden_act": "relu2"}).gated


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (BERT | {"model_type": "xlm-roberta", "vocab_size": 250002}, 560e6),
        (BERT | {"model_type": "electra"}, 335e6),
        (ESM2, 651e6),
        (MODERNBERT, 395e6),
    ],
)
def test_encoders_are_read_as_such(config: dict[str, Any], parameters: float) -> None:
    """They have no gated MLP and no separate output layer, unless their type is known to."""
    shape = read(config)
    assert shape.parameters == pytest.approx(parameters, rel=0.01)
    assert shape.tied
    assert not shape.causal


def test_positions_of_an_encoder_may_be_rotary() -> None:
    assert read(BERT).learned_positions
    assert read(BERT | {"position_embedding_type": "absolute"}).learned_positions
    assert not read(ESM2).learned_positions
    assert not read(MODERNBERT).learned_positions


WINDOWS = COHERE | {"sliding_window": 4096}
FEW_NEAR = ["sliding_attention", "full_attention"] * 20


@pytest.mark.parametrize(
    ("config", "near"),
    [
        (LLAMA4, (8192, 0.25, True)),
        (LLAMA4 | {"no_rope_layers": []}, (8192, 0.25, True)),
        (LLAMA4 | {"no_rope_layers": [1, 0] * 24}, (8192, 0.5, True)),
        (LLAMA4 | {"layer_types": ["full_attention"] * 48}, (0, 0.0, False)),
        (COHERE | {"sliding_window": 4096}, (0, 0.0, False)),
        (COHERE | {"model_type": "cohere2", "sliding_window": 4096}, (4096, 0.25, False)),
        (COHERE | {"sliding_window": 4096, "layer_types": FEW_NEAR}, (4096, 0.5, False)),
        (COHERE | {"sliding_window": None, "layer_types": FEW_NEAR}, (0, 0.0, False)),
        # Layers for the prediction of further tokens follow.
        (WINDOWS | {"layer_types": [*FEW_NEAR, *["sliding_attention"] * 3]}, (4096, 0.5, False)),
        (WINDOWS | {"layer_types": FEW_NEAR, "use_sliding_window": False}, (0, 0.0, False)),
        # All layers of these have the window.
        (WINDOWS | {"model_type": "mistral"}, (4096, 0.0, False)),
        (WINDOWS | {"model_type": "starcoder2"}, (4096, 0.0, False)),
        (WINDOWS | {"model_type": "phi3", "sliding_window": 2047}, (2047, 0.0, False)),
        (WINDOWS | {"model_type": "mistral", "sliding_window": None}, (0, 0.0, False)),
        # Not all models have windows or chunks in layers with rotary positions.
        (WINDOWS | {"model_type": "smollm3", "no_rope_layers": [1, 0] * 20}, (0, 0.0, False)),
    ],
)
def test_windows_and_chunks_come_from_the_file(
    config: dict[str, Any], near: tuple[int, float, bool]
) -> None:
    shape = read(config)
    assert (shape.attended, shape.attends_to_all, shape.attends_in_chunks) == near


@pytest.mark.parametrize("model_type", ["llama", "cohere2"])
def test_a_file_with_too_many_layers_takes_no_memory(model_type: str) -> None:
    file = LLAMA | {"model_type": model_type, "num_hidden_layers": 10**8, "sliding_window": 4096}
    tracemalloc.start()
    shape = read(file)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shape.layers == 10**8
    assert most < 10**7


def test_layers_without_experts_are_counted_in_each_format() -> None:
    assert read(QWEN3_MOE | {"decoder_sparse_step": 2}).moe_layers == 24
    assert read(QWEN3_MOE | {"mlp_only_layers": [0, 5]}).moe_layers == 46
    by_layer = {"moe_layer_freq": [0, 0, *[1] * 59], "first_k_dense_replace": None}
    assert read(DEEPSEEK_V3 | by_layer).dense_layers == 2


def test_the_language_model_of_a_nested_file_may_inherit() -> None:
    nested = {"model_type": "mistral3", "tie_word_embeddings": True}
    text = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    assert read({**nested, "text_config": text}).tied


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ["config.json:1:2", "not JSON"]),
        ("[]", ["config.json", "object"]),
        ("{}", ["config.json: num_hidden_layers (or n_layer", "is missing"]),
        ({"text_config": {}}, ["num_hidden_layers", "is missing"]),
        (
            {"model_type": "resnet", "hidden_sizes": [256, 512], "depths": [3, 4]},
            ["resnet is a model without layers of attention"],
        ),
        ({**LLAMA, "vocab_size": None}, ["vocab_size is missing"]),
        ({**LLAMA, "hidden_size": "4096"}, ["hidden_size must be a whole number, not '4096'"]),
        ({**LLAMA, "num_hidden_layers": True}, ["num_hidden_layers must be"]),
        ({**LLAMA, "num_hidden_layers": -1}, ["num_hidden_layers must be"]),
        ({**LLAMA, "num_attention_heads": 30}, ["30 heads do not divide", "head_dim"]),
        ({**LLAMA, "num_key_value_heads": 5}, ["5 key and value heads do not divide 32"]),
        ({**LLAMA, "intermediate_size": None}, ["intermediate_size", "is missing"]),
        ({**MIXTRAL, "num_experts_per_tok": None}, ["num_experts_per_tok", "is missing"]),
        ({**MIXTRAL, "num_experts_per_tok": 9}, ["9 experts per token", "8"]),
        (
            {"model_type": "deberta-v2", "hidden_size": 768},
            ["deberta-v2 is an encoder", "no shape"],
        ),
        ({"model_type": "bart"}, ["an encoder with a decoder"]),
        ({**BERT, "model_type": "wavlm", "conv_stride": [5]}, ["an encoder of speech"]),
        ({**BERT, "model_type": "albert", "num_hidden_groups": 1}, ["layers share"]),
        ({**BERT, "model_type": "longformer"}, ["sparse attention"]),
        ({**BERT, "model_type": "electra", "embedding_size": 128}, ["embeddings of another size"]),
        (
            {
                **{k: v for k, v in BERT.items() if k != "max_position_embeddings"},
                "model_type": "beit",
                "patch_size": 16,
            },
            ["an encoder of images"],
        ),
        ({"text_config": {**LLAMA, "model_type": "clip_text_model"}}, ["two encoders"]),
        ({"model_type": "t5"}, ["num_heads", "is missing"]),
        ({"model_type": "mamba"}, ["a state-space model"]),
        ({**LLAMA, "attn_type_list": [0, 1] * 16}, ["attention and linear attention"]),
        ({"model_type": "x", "is_encoder_decoder": True}, ["an encoder with a decoder"]),
        (
            {**LLAMA, "model_type": "hybrid", "layer_types": ["pool"] * 32},
            ["layers of type pool"],
        ),
        (
            {**LLAMA, "model_type": "hybrid", "layer_types": ["linear_attention"] * 32},
            ["linear_num_key_heads is missing"],
        ),
        ({**LLAMA, "layer_types": ["mamba"] * 31}, ["31 types of layers", "32 layers"]),
        (
            {**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "M?" * 16},
            ["a layer of type '?'"],
        ),
    ],
)
def test_an_unsupported_file_is_reported_with_key_and_hint(text: Any, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        shape_from_config(text if isinstance(text, str) else json.dumps(text), "config.json")
    assert all(part in caught.value.message for part in parts), caught.value.message
    assert caught.value.hint

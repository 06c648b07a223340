"""Read a model's shape from the ``config.json`` of Hugging Face Transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.parallelism import json_file
from dtrain.parallelism.model.config_file import ConfigFile
from dtrain.parallelism.model.diffusion import diffusion_shape, is_diffusion
from dtrain.parallelism.model.hybrids import (
    ATTENTIONS,
    COMPRESSED,
    MIXERS,
    MOST_LAYERS,
    arranged,
    other_shape,
)
from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass
from dtrain.wording import either

LONGEST_USUAL = 8192
"""Default limit of the training sequence, in tokens: the longest context of a model
is often far longer than the sequences of most of its training."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads")
_FFN = (
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "block_ff_dim",
    "ffn_config.ffn_hidden_size",
)  # fmt: skip
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length",
    "max_sequence_length",
)  # fmt: skip
_EXPERTS = (
    "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts",
    "ffn_config.moe_num_experts",
)  # fmt: skip
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k",
    "top_k_experts", "ffn_config.moe_top_k",
)  # fmt: skip
_SHARED = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)  # fmt: skip
_SHARED_COUNT = (
    "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts",
)  # fmt: skip
_DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_DROPOUT = (
    "resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout", "residual_dropout",
    "resid_dropout", "attn_config.attn_pdrop",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Kind:
    """Facts that a ``model_type`` implies and its file omits."""

    gated: bool = True
    tied: bool = False
    learned_positions: bool = False
    dropout: bool = False
    causal: bool = True
    parallel: bool = False
    qk_norm: bool = False
    window_pattern: float = 0
    """The last of so many layers attends to all tokens, and the others to those of a sliding window
    or of their chunk; 0 if all do, infinity if none does."""
    defaults: Mapping[str, Any] | None = None
    """Defaults of keys that files of this type often omit."""


_GPT2 = _Kind(gated=False, tied=True, learned_positions=True, dropout=True)
_BERT = replace(_GPT2, causal=False)
_BERTS_KEY = "attention_probs_dropout_prob"
"""A key that BERT and its many descendants have (RoBERTa, XLM-R, ELECTRA, ESM), and decoders have
not."""
_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt"), _GPT2),
    "biogpt": _GPT2,
    "modernbert": _Kind(
        tied=True, causal=False, window_pattern=3, defaults={"sliding_window": 128}
    ),
    "gpt_neo": replace(_GPT2, dropout=False),
    "mpt": _Kind(gated=False, tied=True, defaults={"expansion_ratio": 4}),
    "falcon": _Kind(gated=False, tied=True, parallel=True),
    "bloom": _Kind(gated=False, tied=True),
    "starcoder2": _Kind(gated=False, tied=True, window_pattern=math.inf),
    **dict.fromkeys(("mistral", "mixtral", "phi3"), _Kind(window_pattern=math.inf)),
    **dict.fromkeys(("gpt_neox", "gptj", "codegen", "phi"), _Kind(gated=False, parallel=True)),
    **dict.fromkeys(("persimmon", "nemotron", "nemotron_h"), _Kind(gated=False)),
    "gemma": _Kind(tied=True, defaults={"head_dim": 256}),
    "gemma2": _Kind(
        tied=True, window_pattern=2, defaults={"head_dim": 256, "sliding_window": 4096}
    ),
    "gemma3": _Kind(tied=True, window_pattern=6, qk_norm=True),
    "gemma3_text": _Kind(
        tied=True,
        window_pattern=6,
        qk_norm=True,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
        },
    ),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "lfm2", "lfm2_moe"), _Kind(tied=True, qk_norm=True)
    ),
    "cohere": _Kind(tied=True, parallel=True),
    "cohere2": _Kind(tied=True, parallel=True, window_pattern=4),
    **dict.fromkeys(("olmo2", "olmoe"), _Kind(qk_norm=True)),
    "olmo3": _Kind(qk_norm=True, window_pattern=4),
    "llama4_text": _Kind(window_pattern=4),
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _Kind(qk_norm=True)
    ),
    "bitnet": _Kind(),
    "gpt_oss": _Kind(window_pattern=2),
}
"""Types that differ from Llama's gated MLP, separate output layer and rotary positions."""

_OTHER_KNOWN = {
    "aria", "apertus", "arcee", "bailing_hybrid", "bamba", "dbrx", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1",
    "glm", "glm4", "glm4_moe", "glm_moe_dsa", "granite", "granitemoe", "granitemoehybrid", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "internlm2", "internlm3", "kimi_k2",
    "kimi_linear", "lfm3", "llama", "llama4", "mamba2", "minimax_m2", "minimax_m3_vl", "ministral",
    "ministral3", "mistral3", "mt5", "olmo", "olmo_hybrid", "phimoe", "qwen2", "qwen2_5_vl",
    "qwen2_moe", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_next", "seed_oss", "smollm3",
    "solar_open", "stablelm", "t5", "umt5", "yi",
}  # fmt: skip
"""Other types of which the file says all that matters, or that the functions below know."""

_FOUR_TIMES = {"gpt2", "gpt_bigcode", "gpt_neo", "bloom", "falcon", "gptj", "codegen"}
"""Types whose MLP defaults to four times the hidden size."""

_OTHER_THINGS = {
    "deberta-v2": "an encoder",
    "vit": "an encoder of images",
    **dict.fromkeys(("longformer", "big_bird"), "an encoder with sparse attention"),
    **dict.fromkeys(
        ("clip_text_model", "siglip_text_model"), "one of two encoders, of texts and of images"
    ),
    "bart": "an encoder with a decoder",
    "whisper": "an encoder with a decoder",
    "mamba": "a state-space model",
    "jamba": "a mixture of attention and state-space layers",
    "minimax": "a mixture of attention and linear attention",
    **dict.fromkeys(("zamba", "zamba2"), "a mixture of state spaces and attention that is shared"),
    **dict.fromkeys(("dory", "hrm_text"), "a model that runs its layers several times"),
    "moshi": "a model of several streams of speech",
    "rwkv": "a recurrent model",
    "recurrent_gemma": "a mixture of attention and recurrent layers",
    "gemma3n_text": "a nest of models with embeddings of each layer",
    "jetmoe": "a mixture of experts of attention",
    "doge": "a mixture of experts of another kind",
    "longcat_flash": "a mixture of experts of another kind",
}

_KEYS_OF_OTHER_THINGS = {
    "conv_stride": "an encoder of speech with convolutions",
    "num_hidden_groups": "an encoder whose layers share their weights",
    "hidden_size_per_layer_input": "a model with embeddings of each layer",
    **dict.fromkeys(("hc_mult", "hc_count"), "a model with several residual streams"),
    "moe_hidden_size": "a mixture of experts on a latent",
}
"""Keys that tell what a model is, whatever its type, if they are not 0 (wav2vec 2.0, ALBERT,
Gemma 4 E2B)."""

_PLAIN_ACTIVATIONS = {"relu", "relu2", "squared_relu", "xielu"}
"""Activations that files use for MLPs of two matrices."""

_NESTED = ("text_config", "llm_config", "language_config")


def shape_from_config(text: str, where: str) -> Shape:
    """Return the shape that a ``config.json`` describes; ``where`` names the file in errors.

    Of a model that also sees or hears, the language model. The longest context counts up to
    ``LONGEST_USUAL`` tokens. Layers of a mixture that have a dense MLP are taken to be the first,
    whichever they are.

    Raises:
        UsageError: the text is not JSON, describes a model that dtrain has no shape for, or lacks a
            size; names the key.
    """
    values = json_file.parse(text, where, "give the config.json of a Hugging Face model")
    if not isinstance(values, dict):
        raise UsageError(
            f"{where}: must hold a JSON object", hint="give the config.json of a model"
        )
    return shape_from_values(values, where)


def shape_from_values(values: dict[str, Any], where: str) -> Shape:
    """Return `shape_from_config` of a file that is read already."""
    if is_diffusion(values):
        return diffusion_shape(ConfigFile(values, where, ""))
    name = str(values.get("_name_or_path") or "")
    return _Config(_language_model(values), where, name).shape()


def assumption(text: str, where: str) -> str:
    """Return a note on what `shape_from_config` assumes of a file whose ``model_type`` is not
    known, else ''."""
    values = json_file.parse(text, where, "")
    if is_diffusion(values):
        return ""
    file = _Config(_language_model(values), where, "")
    kind = file.model_type
    known = kind in _KINDS or kind.removesuffix("_text") in _OTHER_KNOWN
    if known or _BERTS_KEY in file.values:
        return ""
    shape = file.shape()
    assumed = [
        "causal attention" if shape.causal else "attention in both directions",
        "a gated MLP of three matrices" if shape.gated else "an MLP of two matrices",
        "one matrix for embedding and output" if shape.tied else "a separate output layer",
    ]
    what = (
        f"{where}: the model_type {kind!r} is not known" if kind else f"{where} has no model_type"
    )
    return (
        f"{what}. The plan assumes {either(assumed, 'and')}: compare its number of parameters with "
        "the model's"
    )


def _language_model(values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a file that describes the language model."""
    for name in _NESTED:
        inner = values.get(name)
        if isinstance(inner, dict) and not any(key in values for key in _HIDDEN):
            # The output layer is outside the language model.
            outer = {k: values[k] for k in ("tie_word_embeddings",) if values.get(k) is not None}
            whole = values.get("model_type")
            kind = inner.get("model_type") or (f"{whole}_text" if whole else "")
            return {"model_type": kind, **inner, **outer}
    return values


@dataclass(frozen=True, slots=True)
class _Config(ConfigFile):
    """A file of a decoder or an encoder."""

    @property
    def kind(self) -> _Kind:
        other = _BERT if _BERTS_KEY in self.values else _Kind()
        return _KINDS.get(self.model_type, other)

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.kind.defaults or {}

    def shape(self) -> Shape:
        other = other_shape(self)
        if other is not None:
            return other
        self._refuse_other_things()
        return arranged(self, self._usual_shape())

    def _usual_shape(self) -> Shape:
        """The shape with attention in each layer, and a dense MLP in the first ``dense_layers``."""
        listed = self.get("layers_block_type")
        layers = len(listed) if isinstance(listed, list) and listed else self.needed(*_LAYERS)
        hidden = self.needed(*_HIDDEN)
        heads = self.needed(*_HEADS)
        head_size = self.head_size(hidden, heads)
        experts = self.count(*_EXPERTS)
        experts = experts if experts > 1 else 0
        ffn, dense_ffn, dense_layers = self.mlps(layers, hidden, experts)
        latent = self.count("kv_lora_rank")
        kv_heads = heads if latent else self.kv_heads(heads)
        if heads % kv_heads:
            self.refuse(f"{kv_heads} key and value heads do not divide {heads} heads")
        positions = self.count(*_POSITIONS)
        length = min(positions or 2048, LONGEST_USUAL)
        chosen = self.needed(*_CHOSEN) if experts else 0
        if chosen > experts:
            self.refuse(f"{chosen} experts per token are more than the {experts} there are")
        return Shape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn_hidden=ffn,
            vocab=self.needed("vocab_size"),
            seq_len=length,
            head_size=head_size,
            gated=self.gated,
            tied=bool(self.get("tie_word_embeddings", default=self.kind.tied)),
            learned_positions=self.learned_positions,
            dropout=self.dropout,
            causal=self.kind.causal,
            parallel=bool(
                self.get("use_parallel_residual", "parallel_attn", default=self.kind.parallel)
            ),
            qk_norm=bool(self.get("use_qk_norm", default=self.kind.qk_norm)),
            experts=experts,
            experts_per_token=chosen,
            shared_experts=self.shared_experts(ffn) if experts else 0,
            dense_layers=dense_layers,
            dense_ffn_hidden=dense_ffn if dense_layers else 0,
            kv_rank=latent,
            query_rank=self.count("q_lora_rank") if latent else 0,
            rope_head_size=self.count("qk_rope_head_dim") if latent else 0,
            value_head_size=self.count("v_head_dim") if latent else 0,
            **self.near(layers),
            name=self.name.rpartition("/")[2] or self.model_type,
        )

    def _refuse_other_things(self) -> None:
        thing = _OTHER_THINGS.get(self.model_type)
        if thing is None and self.values.get("is_encoder_decoder"):
            thing = "an encoder with a decoder"
        if self.model_type == COMPRESSED:
            return
        named = (name for key, name in _KEYS_OF_OTHER_THINGS.items() if self.values.get(key))
        thing = thing or next(named, None)
        width = self.get("embedding_size", "input_embedding_size")
        if thing is None and _BERTS_KEY in self.values and width not in (None, self.get(*_HIDDEN)):
            thing = "an encoder with embeddings of another size"
        kinds = self.get("attn_type_list")
        if thing is None and isinstance(kinds, list) and 0 in kinds:
            thing = "a mixture of attention and linear attention"
        if thing is None and "patch_size" in self.values and self.get(*_POSITIONS) is None:
            thing = "an encoder of images"
        if thing is None and self.model_type and self.get(*_LAYERS, *_HIDDEN, *_HEADS) is None:
            thing = "a model without layers of attention"
        listed = self.get("layer_types")
        if thing is None and isinstance(listed, list):
            odd = [kind for kind in map(str, listed) if kind not in ATTENTIONS | MIXERS]
            thing = f"a model with layers of type {odd[0]}" if odd else None
        if thing:
            raise UsageError(
                f"{self.where}: {self.model_type or 'this model'} is {thing}, for which dtrain "
                f"has no shape",
                hint="plan for a similar size: `model_size`, or `layers`, `hidden`, `heads`",
            )

    def attentions(self, layers: int) -> list[str]:
        """Return the kind of each layer's attention, as Transformers names it; none if all layers
        attend to all tokens."""
        listed = self.get("layer_types")
        if isinstance(listed, list) and listed:
            return [kind for kind in map(str, listed[:layers]) if kind in ATTENTIONS]
        if not self.kind.window_pattern:
            return []
        near = "chunked_attention" if self.get("attention_chunk_size") else "sliding_attention"
        rotary = self.get("no_rope_layers")
        if isinstance(rotary, list) and rotary:
            return [near if one else "full_attention" for one in rotary[:layers]]
        given = self.count("sliding_window_pattern", "no_rope_layer_interval")
        every = given or self.kind.window_pattern
        places = range(1, min(layers, MOST_LAYERS) + 1)
        return ["full_attention" if i % every == 0 else near for i in places]

    def near(self, layers: int) -> dict[str, Any]:
        """Return the fields of a shape some of whose layers attend to a window or a chunk."""
        every = self.attentions(layers)
        chunks, windows = map(every.count, ("chunked_attention", "sliding_attention"))
        tokens = self.count("attention_chunk_size" if chunks else "sliding_window")
        unused = not chunks and self.get("use_sliding_window") is False
        if not (chunks or windows) or not tokens or unused:
            return {}
        whole = 1 - (chunks + windows) / len(every)
        return {
            "attended": tokens, "attends_to_all": round(whole, 4), "attends_in_chunks": chunks > 0,
        }  # fmt: skip

    def head_size(self, hidden: int, heads: int) -> int:
        if self.count("kv_lora_rank"):
            unrotated = self.needed("qk_nope_head_dim")
            return unrotated + self.needed("qk_rope_head_dim")
        size = self.count("head_dim")
        if not size and hidden % heads:
            self.refuse(f"{heads} heads do not divide the hidden size {hidden}, and no head_dim")
        return size or hidden // heads

    def kv_heads(self, heads: int) -> int:
        if self.model_type == "falcon" and not self.values.get("new_decoder_architecture"):
            return 1 if self.get("multi_query", default=True) else heads
        if self.values.get("multi_query") and self.model_type == "gpt_bigcode":
            return 1
        return self.count(*_KV_HEADS) or heads

    @property
    def gated(self) -> bool:
        if self.model_type in _KINDS or not self.kind.gated:
            return self.kind.gated
        # Other types are like GPT if they have its activation or its LayerNorm key.
        if str(self.get("hidden_act", "activation_function")) in _PLAIN_ACTIVATIONS:
            return False
        return not any(name in self.values for name in ("layer_norm_epsilon", "n_inner"))

    @property
    def learned_positions(self) -> bool:
        given = self.get("position_embedding_type")
        usual = self.kind.learned_positions
        return given == "learned" or (usual and given in (None, "absolute"))

    @property
    def dropout(self) -> bool:
        given = [self.get(name) for name in _DROPOUT]
        shares = [share for share in given if isinstance(share, (int, float))]
        return any(share > 0 for share in shares) if shares else self.kind.dropout

    def mlps(self, layers: int, hidden: int, experts: int) -> tuple[int, int, int]:
        """Return the width of an expert (or the only MLP) and of a dense layer, and the number of
        dense layers."""
        ffn = self.count(*_FFN)
        if self.get("block_auto_adjust_ff_dim"):
            ffn = self._adjusted(2 * ffn // 3)
        if not ffn and self.get("expansion_ratio"):
            ffn = self.needed("expansion_ratio") * hidden
        if not ffn and self.model_type in _FOUR_TIMES:
            ffn = 4 * hidden
        expert = self.count("moe_intermediate_size") if experts else 0
        if not ffn and not expert:
            ffn = self.needed(*_FFN)
        dense = self.count("intermediate_size_mlp", "dense_intermediate_size") or ffn
        return expert or ffn, dense, self.dense_layers(layers) if experts else 0

    def _adjusted(self, ffn: int) -> int:
        """The width of LFM2's MLP, as its module computes it from two thirds of the file's."""
        factor = self.get("block_ffn_dim_multiplier")
        if isinstance(factor, (int, float)) and 0 < factor < 100:
            ffn = int(factor * ffn)
        multiple = self.count("block_multiple_of") or 256
        return -(-ffn // multiple) * multiple

    def dense_layers(self, layers: int) -> int:
        count = self.count(*_DENSE_LAYERS)
        listed = self.get("mlp_only_layers")
        if isinstance(listed, list):
            count = len(listed)
        pattern = self.get("mlp_layer_types")
        if isinstance(pattern, list):
            return sum(kind == "dense" for kind in pattern)
        by_layer = self.get("moe_layer_freq")
        if isinstance(by_layer, list):
            return sum(not kind for kind in by_layer)
        every = self.count("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
        return layers - (layers - count) // every if every > 1 else min(count, layers)

    def shared_experts(self, ffn: int) -> int:
        """Return the number of shared experts, in units of the usual width, rounded."""
        width = self.count(*_SHARED)
        if self.get("enable_moe_block"):  # Gemma 4 has experts beside the MLP
            width = self.needed("intermediate_size")
        if width:
            return round(width / ffn)
        if self.model_type.startswith("llama4"):
            return 1
        return self.count(*_SHARED_COUNT)

"""Layers that differ, from a ``config.json``: state-space layers, linear attention and convolutions
beside attention, experts in some layers, heads of other sizes, and a decoder after an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from dtrain.parallelism.model.config_file import ConfigFile
from dtrain.parallelism.model.mixers import DeltaNet, KimiDelta, Mamba2, ShortConv
from dtrain.parallelism.model.parts import (
    CrossAttention,
    HyperConnections,
    LatentExperts,
    LayerPart,
    OutputGate,
)
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.model.sparse import CompressedAttention, Indexer

ATTENTIONS = {
    "attention", "full_attention", "sliding_attention", "chunked_attention", "indexed_attention",
    "hybrid",
}  # fmt: skip
"""Layer types with queries, keys and values, over any range of tokens. ``hybrid`` is Falcon-H1's,
with a state-space mixer beside."""
MIXERS = {"mamba", "mamba2", "linear_attention", "conv", "mlp", "moe"}
"""Other layer types. Files of Transformers 5 also call state spaces ``linear_attention``."""

MOST_LAYERS = 2000
"""Layers of a pattern; no model has more."""
_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Layer types in the pattern of Nemotron-H, and Megatron-LM's ``--hybrid-layer-pattern``."""
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")
"""Start of types whose attention has an output gate."""
_ATTENTION_AT = ("attn_layer_indices", "full_attn_idxs")
"""Lists of the layers with attention, from 0 (Bamba, LFM2)."""
_OWN_SIZES = {"head_dim": "head_size", "num_key_value_heads": "kv_heads"}
"""Sizes that a layer may have of its own, and the fields of a `Shape` for them."""
COMPRESSED = "deepseek_v4"
"""The type whose layers attend to compressed keys."""
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {"sliding_attention": 0, _SPARSE: 4, _HEAVY: 128}
"""Its types of layers, and the usual number of tokens that an entry of keys stands for."""
_OLD_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
"""Keys of older files that replace such a number."""
_MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads")
_MAMBA_SIZE = ("mamba_head_dim", "mamba_d_head")
_KDA_HEADS = ("linear_num_heads", "linear_attn_config.num_heads")
_TARGETS = 114 / 512
"""T5's targets for each input token: 15 % of the tokens are hidden, in spans of 3 (arXiv
1910.10683, section 3.1.4)."""


def other_shape(file: ConfigFile) -> Shape | None:
    """Return the shape of a model without a decoder of attention layers; None if it has one."""
    if file.model_type in ("t5", "mt5", "umt5"):
        return _encoder_decoder(file)
    if file.model_type == "mamba2" or file.get("ssm_cfg.layer") == "Mamba2":
        return _state_space(file)
    return None


def arranged(file: ConfigFile, base: Shape) -> Shape:
    """Return ``base`` with a pattern, if the file lists layers of several kinds.

    ``base`` has the file's attention in each layer, and its dense MLP and its experts.
    """
    if file.model_type == "falcon_h1":
        return replace(base, parts=(_mamba(file, base.hidden, beside=True),))
    if file.model_type == COMPRESSED:
        return _compressed(file, base)
    if file.model_type == "granitemoehybrid":
        base = _with_shared_mlp(file, base)
    if base.kv_rank and file.count("index_topk"):
        base = _with_indexer(file, base)
    types = _layer_types(file, base.layers)
    if base.layers > MOST_LAYERS:
        return base  # too many layers for any plan
    types = types or ["attention"] * base.layers
    moe = _moe_at(file, base)
    own = _own_sizes(file, base.layers, base.heads)
    in_order = all(moe(place) == (place >= base.dense_layers) for place in range(base.layers))
    plain = set(types) <= ATTENTIONS and not (base.parts or own or _latent(file, base))
    if plain and (in_order or not base.experts):
        return base
    kinds = _kinds(file, base)
    pattern = tuple(
        replace(kinds(type_, moe(place)), **own.get(place, {}) if type_ in ATTENTIONS else {})
        for place, type_ in enumerate(types)
    )
    return replace(base, dense_layers=0, dense_ffn_hidden=0, parts=(), pattern=pattern)


def _own_sizes(file: ConfigFile, layers: int, heads: int) -> Mapping[int, Mapping[str, Any]]:
    """Return the fields of layers, by place, whose attention has sizes of its own."""
    given, layers = file.get("per_layer_config"), min(layers, MOST_LAYERS)
    if isinstance(given, dict):
        # Keys such as 05.
        short = {key: sizes for key, sizes in given.items() if key.isdecimal() and len(key) < 5}
        own = {int(key): sizes for key, sizes in short.items() if int(key) < layers}
    elif file.model_type.startswith("gemma4"):
        sizes = {"head_dim": file.count("global_head_dim") or 512}
        kv_heads = file.count("num_global_key_value_heads")
        if kv_heads and file.get("attention_k_eq_v"):
            sizes["num_key_value_heads"] = kv_heads
        listed = file.get("layer_types")
        types = listed[:layers] if isinstance(listed, list) else []
        own = {place: sizes for place, type_ in enumerate(types) if type_ == "full_attention"}
    else:
        return {}
    return {place: _fields(file, sizes, heads) for place, sizes in own.items()}


def _fields(file: ConfigFile, sizes: Any, heads: int) -> Mapping[str, Any]:
    if not isinstance(sizes, dict) or not sizes.keys() <= _OWN_SIZES.keys():
        file.refuse(f"per_layer_config may have {' and '.join(_OWN_SIZES)}")
    layer = replace(file, values=sizes)
    fields = {_OWN_SIZES[key]: layer.needed(key) for key in sizes}
    kv_heads = fields.get("kv_heads", heads)
    if heads % kv_heads:
        file.refuse(f"{kv_heads} key and value heads of a layer do not divide {heads} heads")
    return fields


def _layer_types(file: ConfigFile, layers: int) -> list[str]:
    """Return the type of each layer, as in files' ``layer_types``; none if all have attention."""
    symbols = file.get("hybrid_override_pattern", "hybrid_layer_pattern")
    listed = file.get("layer_types", "layers_block_type")
    every = file.count("full_attention_interval", "layer_group_size")
    from_one = file.get("linear_attn_config.full_attn_layers")
    if isinstance(symbols, str):
        types = [_SYMBOLS.get(one, one) for one in symbols if one != "|"]
    elif isinstance(listed, list):
        types = [str(one) for one in listed]
    elif any(key in file.values for key in _ATTENTION_AT):
        places = _numbers(file.get(*_ATTENTION_AT))
        other = "conv" if file.get("conv_L_cache") else "linear_attention"
        types = _alternating(layers, lambda place: place in places, other)
    elif from_one is not None:
        places = _numbers(from_one)
        types = _alternating(layers, lambda place: place + 1 in places)
    elif file.model_type.startswith((*_GATED_ATTENTION, "bailing_hybrid")):
        every = every or 4
        types = _alternating(layers, lambda place: (place + 1) % every == 0)
    else:
        return []
    if set(types) <= ATTENTIONS:
        return []
    if odd := [one for one in types if one not in ATTENTIONS | MIXERS]:
        file.refuse(f"a layer of type {odd[0]!r} is not known")
    if len(types) != min(layers, MOST_LAYERS):
        file.refuse(f"{len(types)} types of layers are given for {layers} layers")
    return types


def _numbers(listed: Any) -> set[int]:
    items = listed if isinstance(listed, list) else []
    return {item for item in items if isinstance(item, int)}


def _alternating(
    layers: int, attends: Callable[[int], bool], other: str = "linear_attention"
) -> list[str]:
    return [
        "full_attention" if attends(place) else other for place in range(min(layers, MOST_LAYERS))
    ]


def _moe_at(file: ConfigFile, base: Shape) -> Callable[[int], bool]:
    """Return whether the layer at a place, from 0, has experts."""
    dense = file.get("mlp_only_layers")
    listed = file.get("mlp_layer_types", "moe_layer_freq")
    every = file.count("decoder_sparse_step", "interleave_moe_layer_step")
    if not base.experts:
        return lambda place: False
    if isinstance(listed, list) and len(listed) == base.layers:
        return lambda place: listed[place] not in (0, "dense")
    if every > 1 or isinstance(dense, list):
        without = dense if isinstance(dense, list) else []
        return lambda place: place not in without and (place + 1) % max(every, 1) == 0
    return lambda place: place >= base.dense_layers


def _latent(file: ConfigFile, base: Shape) -> tuple[LatentExperts, ...]:
    size = file.count("moe_latent_size") if base.experts else 0
    return (LatentExperts(size),) if size else ()


def _kinds(file: ConfigFile, base: Shape) -> Callable[[str, bool], Shape]:
    """Return a function from a layer's type, and whether it has experts, to its shape."""
    whole = replace(base, layers=1, dense_layers=0, dense_ffn_hidden=0, name="")
    latent = _latent(file, base)
    whole = replace(whole, parts=(*base.parts, *latent))
    width = base.dense_ffn_hidden or (base.experts and file.count("intermediate_size"))
    dense = replace(
        whole, experts=0, experts_per_token=0, shared_experts=0, parts=base.parts,
        ffn_hidden=width or base.ffn_hidden,
    )  # fmt: skip
    if file.model_type == "nemotron_h":
        # A layer is attention, a mixer or an MLP alone.
        return cache(lambda type_, moe: _alone(file, type_, whole, dense))

    @cache
    def kind(type_: str, moe: bool) -> Shape:
        one = whole if moe else dense
        if type_ not in ATTENTIONS:
            return replace(
                one, heads=0, kv_heads=0, kv_rank=0, query_rank=0, rope_head_size=0,
                value_head_size=0,
                parts=(_mixer(file, type_, one.hidden), *(latent if moe else ())),
            )  # fmt: skip
        if file.model_type.startswith(_GATED_ATTENTION):
            return replace(one, parts=(OutputGate(one.heads * one.head_size), *one.parts))
        return one

    return kind


def _alone(file: ConfigFile, type_: str, whole: Shape, dense: Shape) -> Shape:
    """Return a layer that has nothing beside what its type says."""
    if type_ == "moe":
        return replace(whole, heads=0, kv_heads=0)
    if type_ == "mlp":
        return replace(dense, heads=0, kv_heads=0)
    if type_ in ATTENTIONS:
        return replace(dense, ffn_hidden=0)
    return replace(
        dense, heads=0, kv_heads=0, ffn_hidden=0, parts=(_mamba(file, dense.hidden),)
    )  # fmt: skip


def _compressed(file: ConfigFile, base: Shape) -> Shape:
    """Return DeepSeek-V4's shape."""
    layers = base.layers
    if layers > MOST_LAYERS:
        return base
    types, ratios = file.get("layer_types"), file.get("compress_ratios")
    if isinstance(ratios, list) and not isinstance(types, list):
        names = {rate: name for name, rate in _RATES.items()}
        types = [names.get(one) if isinstance(one, int) else None for one in ratios]
    elif not isinstance(types, list):
        # The default of Transformers.
        types = [_SPARSE if place > 1 and place % 2 else _HEAVY for place in range(layers)]
    types = [str(one) for one in types[:layers]]
    if len(types) < layers or not {*types} <= _RATES.keys():
        file.refuse(f"layer_types must have one of {', '.join(_RATES)} for each layer")
    streams = HyperConnections(file.needed("hc_mult"))
    if base.heads * base.head_size % file.needed("o_groups"):
        file.refuse(f"{file.needed('o_groups')} o_groups do not divide the output of attention")
    # All layers have experts.
    base = replace(base, attended=0, dense_layers=0, dense_ffn_hidden=0)
    alone = replace(base, layers=1, heads=0, kv_heads=0, name="")
    kinds = {
        type_: replace(alone, parts=(_compressed_attention(file, base, type_), streams))
        for type_ in {*types}
    }
    return replace(base, pattern=tuple(kinds[type_] for type_ in types))


def _compressed_attention(file: ConfigFile, base: Shape, type_: str) -> CompressedAttention:
    usual = _RATES[type_]
    given = [_OLD_RATES[type_], f"compress_rates.{type_}"] if usual else []
    attention = CompressedAttention(
        heads=base.heads,
        head_size=base.head_size,
        query_rank=file.needed("q_lora_rank"),
        groups=file.needed("o_groups"),
        output_rank=file.needed("o_lora_rank"),
        window=file.needed("sliding_window"),
        length=base.seq_len,
        rate=file.count(*given) or usual,
    )
    if type_ != _SPARSE:
        return attention
    return replace(
        attention,
        chosen=file.needed("index_topk"),
        index_heads=file.needed("index_n_heads"),
        index_size=file.needed("index_head_dim"),
    )


def _with_indexer(file: ConfigFile, base: Shape) -> Shape:
    """Return DeepSeek-V3.2's layer, whose attention is sparse."""
    indexer = Indexer(
        heads=file.needed("index_n_heads"),
        size=file.needed("index_head_dim"),
        query_rank=base.query_rank or base.hidden,
        length=base.seq_len,
    )
    return replace(base, attended=file.count("index_topk"), parts=(indexer,))


def _with_shared_mlp(file: ConfigFile, base: Shape) -> Shape:
    """Return Granite's layer without experts, whose MLP is the shared one."""
    width = file.count("shared_intermediate_size")
    return base if base.experts else replace(base, ffn_hidden=width or base.ffn_hidden)


def _mixer(file: ConfigFile, type_: str, hidden: int) -> LayerPart:
    """Return what a layer of this type has instead of attention."""
    if type_ == "conv":
        return ShortConv(file.needed("conv_L_cache"))
    if type_ != "linear_attention" or file.count(*_MAMBA_HEADS):
        return _mamba(file, hidden)
    return _kimi_delta(file) if file.count(*_KDA_HEADS) else _delta_net(file)


def _mamba(file: ConfigFile, hidden: int, *, beside: bool = False) -> Mamba2:
    inner = file.count("mamba_d_ssm") or (file.count("mamba_expand", "expand") or 2) * hidden
    heads = file.needed(*_MAMBA_HEADS)
    size = file.get(*_MAMBA_SIZE)
    return Mamba2(
        heads=heads,
        head_size=inner // heads if size == "auto" else file.needed(*_MAMBA_SIZE),
        state=file.needed("ssm_state_size", "mamba_d_state", "state_size"),
        groups=file.count("mamba_n_groups", "n_groups") or 1,
        conv=file.count("conv_kernel", "mamba_d_conv") or 4,
        chunk=file.count("chunk_size", "mamba_chunk_size") or 256,
        gated_norm=bool(file.get("mamba_rms_norm", default=True)),
        beside=beside,
    )


def _delta_net(file: ConfigFile) -> DeltaNet:
    return DeltaNet(
        key_heads=file.needed("linear_num_key_heads"),
        key_size=file.needed("linear_key_head_dim"),
        heads=file.needed("linear_num_value_heads"),
        value_size=file.needed("linear_value_head_dim"),
        conv=file.count("linear_conv_kernel_dim") or 4,
    )


def _kimi_delta(file: ConfigFile) -> KimiDelta:
    heads = file.needed(*_KDA_HEADS)
    size = file.needed("linear_head_dim", "linear_attn_config.head_dim")
    return KimiDelta(
        key_heads=heads,
        key_size=size,
        heads=heads,
        value_size=size,
        conv=file.count("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size") or 4,
        gate_rank=0 if file.model_type == "bailing_hybrid" else size,
    )


def _state_space(file: ConfigFile) -> Shape:
    """Return the shape of Mamba-2, in the format of Transformers or of ``mamba_ssm``."""
    hidden = file.needed("hidden_size", "d_model")
    size = file.count("head_dim", "ssm_cfg.headdim") or 64
    inner = (file.count("expand", "ssm_cfg.expand") or 2) * hidden
    part = Mamba2(
        heads=file.count("num_heads") or max(1, inner // size),
        head_size=size,
        state=file.count("state_size", "ssm_cfg.d_state") or 128,
        groups=file.count("n_groups", "ssm_cfg.ngroups") or 1,
        conv=file.count("conv_kernel", "ssm_cfg.d_conv") or 4,
        chunk=file.count("chunk_size") or 256,
    )
    return Shape(
        layers=file.needed("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=0,
        kv_heads=0,
        ffn_hidden=0,
        vocab=file.needed("vocab_size"),
        seq_len=2048,
        head_size=size,
        tied=bool(
            file.get("tie_word_embeddings", "tie_embeddings", default="ssm_cfg" in file.values)
        ),
        parts=(part,),
        name=file.name.rpartition("/")[2] or "mamba2",
    )


def _encoder_decoder(file: ConfigFile) -> Shape:
    """Return T5's shape: the encoder's layers, and the decoder's with attention to the encoder."""
    length = file.count("n_positions") or 512
    target = max(1, round(length * _TARGETS))
    heads = file.needed("num_heads", "num_attention_heads")
    hidden = file.needed("d_model", "hidden_size")
    size = file.count("d_kv") or max(1, hidden // heads)
    dropout = file.get("dropout_rate", default=0.1)
    gated = "gated" in str(file.get("feed_forward_proj", default="relu"))
    encoder = Shape(
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=file.needed("d_ff"),
        vocab=file.needed("vocab_size"),
        seq_len=length,
        head_size=size,
        gated=gated,
        tied=bool(file.get("tie_word_embeddings", default=file.model_type == "t5" and not gated)),
        dropout=isinstance(dropout, (int, float)) and dropout > 0,
        causal=False,
        target_len=target,
    )
    cross = CrossAttention(heads, size, source=length, target=target)
    decoder = replace(encoder, seq_len=target, causal=True, parts=(cross,))
    encoders = file.needed("num_layers")
    decoders = file.count("num_decoder_layers") or encoders
    if encoders + decoders > MOST_LAYERS:
        file.refuse(f"{encoders + decoders} layers are more than dtrain plans for")
    return replace(
        encoder,
        layers=encoders + decoders,
        pattern=(encoder,) * encoders + (decoder,) * decoders,
        name=file.name.rpartition("/")[2] or file.model_type,
    )

"""Layers that differ, from a ``config.json``: state-space layers and linear attention beside
attention, experts in some layers, and a decoder after an encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from dtrain.parallelism.model.config_file import ConfigFile
from dtrain.parallelism.model.parts import CrossAttention, DeltaNet, Indexer, Mamba2, OutputGate
from dtrain.parallelism.model.shape import Shape

ATTENTIONS = {"attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid"}
"""Layer types with queries, keys and values, over any range of tokens. ``hybrid`` is Falcon-H1's,
with a state-space mixer beside."""
MIXERS = {"mamba", "mamba2", "linear_attention", "mlp", "moe"}
"""Other layer types."""

MOST_LAYERS = 2000
"""Layers of a pattern; no model has more."""
_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Layer types in the pattern of Nemotron-H, and Megatron-LM's ``--hybrid-layer-pattern``."""
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")
"""Start of types whose attention has an output gate."""
_MAMBA_SIZE = ("mamba_head_dim", "mamba_d_head")
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
    if file.model_type == "granitemoehybrid":
        base = _with_shared_mlp(file, base)
    if base.kv_rank and file.count("index_topk"):
        base = _with_indexer(file, base)
    types = _layer_types(file, base.layers)
    if base.layers > MOST_LAYERS:
        return base  # too many layers for any plan
    types = types or ["attention"] * base.layers
    moe = _moe_at(file, base)
    in_order = all(moe(place) == (place >= base.dense_layers) for place in range(base.layers))
    if set(types) <= ATTENTIONS and (in_order or not base.experts) and not base.parts:
        return base
    kinds = _kinds(file, base)
    pattern = tuple(kinds(type_, moe(place)) for place, type_ in enumerate(types))
    return replace(base, dense_layers=0, dense_ffn_hidden=0, parts=(), pattern=pattern)


def _layer_types(file: ConfigFile, layers: int) -> list[str]:
    """Return the type of each layer, as in files' ``layer_types``; none if all have attention."""
    symbols = file.get("hybrid_override_pattern", "hybrid_layer_pattern")
    listed = file.get("layer_types", "layers_block_type")
    every = file.count("full_attention_interval")
    if isinstance(symbols, str):
        types = [_SYMBOLS.get(one, one) for one in symbols if one != "|"]
    elif isinstance(listed, list):
        types = [str(one) for one in listed]
    elif file.model_type.startswith(_GATED_ATTENTION):
        every = every or 4
        types = [
            "linear_attention" if (place + 1) % every else "full_attention"
            for place in range(min(layers, MOST_LAYERS))
        ]
    else:
        return []
    if set(types) <= ATTENTIONS:
        return []
    if odd := [one for one in types if one not in ATTENTIONS | MIXERS]:
        file.refuse(f"a layer of type {odd[0]!r} is not known")
    if len(types) != min(layers, MOST_LAYERS):
        file.refuse(f"{len(types)} types of layers are given for {layers} layers")
    return types


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


def _kinds(file: ConfigFile, base: Shape) -> Callable[[str, bool], Shape]:
    """Return a function from a layer's type, and whether it has experts, to its shape."""
    whole = replace(base, layers=1, dense_layers=0, dense_ffn_hidden=0, name="")
    dense = replace(
        whole, experts=0, experts_per_token=0, shared_experts=0,
        ffn_hidden=base.dense_ffn_hidden or file.count("intermediate_size") or base.ffn_hidden,
    )  # fmt: skip
    if file.model_type == "nemotron_h":
        # A layer is attention, a mixer or an MLP alone.
        return cache(lambda type_, moe: _alone(file, type_, whole, dense))

    @cache
    def kind(type_: str, moe: bool) -> Shape:
        one = whole if moe else dense
        if type_ not in ATTENTIONS:
            part = _delta_net(file) if type_ == "linear_attention" else _mamba(file, one.hidden)
            return replace(one, heads=0, kv_heads=0, parts=(part,))
        if file.model_type.startswith(_GATED_ATTENTION):
            return replace(one, parts=(OutputGate(one.heads * one.head_size),))
        return one

    return kind


def _alone(file: ConfigFile, type_: str, whole: Shape, dense: Shape) -> Shape:
    """Return a layer that has nothing beside what its type says."""
    if type_ == "moe":
        if file.count("moe_latent_size"):
            file.refuse("experts on a latent (moe_latent_size) have no shape")
        return replace(whole, heads=0, kv_heads=0)
    if type_ == "mlp":
        return replace(dense, heads=0, kv_heads=0)
    if type_ in ATTENTIONS:
        return replace(dense, ffn_hidden=0)
    return replace(
        dense, heads=0, kv_heads=0, ffn_hidden=0, parts=(_mamba(file, dense.hidden),)
    )  # fmt: skip


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
    """Return Granite's layer, whose shared MLP is beside its experts, or alone."""
    width = file.count("shared_intermediate_size")
    if not base.experts:
        return replace(base, ffn_hidden=width or base.ffn_hidden)
    return replace(base, shared_experts=round(width / base.ffn_hidden))


def _mamba(file: ConfigFile, hidden: int, *, beside: bool = False) -> Mamba2:
    inner = file.count("mamba_d_ssm") or (file.count("mamba_expand", "expand") or 2) * hidden
    heads = file.needed("mamba_num_heads", "mamba_n_heads")
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

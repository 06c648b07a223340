"""A model's shape from its total size, or from separate sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from dtrain.diagnostics import UsageError
from dtrain.parallelism.model.shape import Shape

_UNITS = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "bn": 9, "t": 12}

_HEAD = 8
"""Attention kernels take heads of a multiple of this size."""

_COUNT = re.compile(r"(-?(?:\d+(?:\.\d*)?|\.\d+))(e\d{1,2})?\s*([a-z]*)")


def parse_count(text: str, what: str = "model_size") -> int:
    """Parse a number such as ``350M``, ``100B``, ``1.5T``, ``7e9`` or ``1_000_000``.

    ``what`` names the field in errors.

    Raises:
        UsageError: the text is not a number, or not above 0.
    """
    plain = text.strip().lower().replace("_", "").replace(",", "")
    match = _COUNT.fullmatch(plain) if len(plain) <= 40 else None
    if match is None or match[3] not in _UNITS:
        raise UsageError(
            f"`{what}` {text!r} is not a number",
            hint="write it with K, M, B or T, such as 350M, 100B or 1.5T",
        )
    whole, _, decimals = match[1].partition(".")
    power = _UNITS[match[3]] + int((match[2] or "e0")[1:]) - len(decimals)
    # Compute with integers: 1.1 × 10⁹ in floating point is not a whole number.
    digits, tens = int(whole + decimals), 10 ** abs(power)
    count, rest = (digits * tens, 0) if power >= 0 else divmod(digits, tens)
    if rest or count < 1:
        raise UsageError(
            f"`{what}` {text!r} is not a whole number above 0", hint="write a size such as 100B"
        )
    return int(count)


_SMALLEST, _LARGEST = 2e6, 1e14

_WIDTH_OVER_DEPTH = (
    # Parameters, and hidden / layers of successful models of about that size.
    (1e7, 32.0),
    (1e8, 64.0),  # GPT-2 small: 768 / 12
    (1e9, 96.0),  # GPT-3 XL: 2048 / 24
    (8e9, 128.0),  # Llama 3 8B: 4096 / 32
    (7e10, 110.0),  # Llama 3 70B: 8192 / 80
    (4e11, 130.0),  # Llama 3.1 405B: 16384 / 126; GPT-3 175B: 12288 / 96
    (1e12, 200.0),  # Megatron-LM 1T (arXiv 2104.04473 table 1): 25600 / 128
    (1e13, 300.0),
)


def shape_for_size(
    parameters: float, *, seq_len: int | None = None, vocab: int | None = None
) -> Shape:
    """Return a typical dense shape with about that many parameters: within 1 %, at worst 2 %.

    From 1B on, like Llama 3: gated MLPs near 3.25 times the hidden size, heads of 128,
    8 key and value heads. Below, like GPT-2: heads of 64, narrower MLPs. Width and
    depth have the proportion of published models of about that size, and all sizes divide
    well: layers by 4 and preferably by 8 or 16 for pipelines (by 2 below 1B, and preferably by the
    stages that the model needs above 1T), heads by 8 for tensor parallelism from hidden 1024 on,
    the MLP by 256 from hidden 512 on.

    Raises:
        UsageError: no typical shape has this size, or the vocabulary leaves no room for layers.
    """
    if not _SMALLEST <= parameters <= _LARGEST:
        sizes = "give the sizes of the model instead: `layers`, `hidden`, `heads`"
        raise UsageError(
            f"`model_size={parameters:.9g}` is not between 2M and 100T parameters",
            hint=f"did you mean {parameters:g}B?" if parameters <= 1000 else sizes,
        )
    vocab = vocab or _usual_vocab(parameters)
    tied = parameters < 4e9
    embeddings = (1 if tied else 2) * vocab
    found = min(_candidates(parameters, embeddings, 0.01), default=None) or min(
        _candidates(parameters, embeddings, 0.02), default=None
    )
    if found is None:
        raise UsageError(
            f"`model_size={parameters:.9g}` does not suit a `vocab` of {vocab}: with its "
            "embedding, no typical layers reach that size",
            hint="use a smaller vocabulary, or give `layers`, `hidden` and `heads`",
        )
    _, hidden, layers, ffn, head_size = found
    heads = hidden // head_size
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(heads, parameters),
        ffn_hidden=ffn,
        vocab=vocab,
        seq_len=seq_len or (2048 if parameters < 1e9 else 4096),
        head_size=head_size,
        tied=tied,
    )


def _usual_vocab(parameters: float) -> int:
    """Llama 3's vocabulary for large models; for small ones, one that leaves most parameters to
    the layers."""
    for below, vocab in ((5e6, 1024), (3e7, 8192), (1e8, 16384), (4e9, 50304)):
        if parameters < below:
            return vocab
    return 128256


def _kv_heads(heads: int, parameters: float) -> int:
    return 8 if parameters >= 1e9 and heads % 8 == 0 else heads


def _candidates(
    parameters: float, embeddings: int, tolerance: float
) -> Iterator[tuple[float, int, int, int, int]]:
    """Yield hidden size, layers, MLP and head size that reach the number of parameters.

    The first element is the distance from the ideal. ``embeddings`` is the number of rows
    of the matrices outside of the layers.
    """
    ratio = _width_over_depth(parameters)
    large = parameters >= 1e9
    # Solve 12·L·h² parameters for layers of the ratio's depth.
    width = (parameters * ratio / 12) ** (1 / 3)
    head_size = 128 if large else 64
    step = 1024 if large else 128 if width >= 512 else 64
    ideal_mlp = 3.25 if large else 8 / 3
    # Wide MLPs of a round size divide over 8 GPUs into matrices that suit tensor cores.
    unit = next(unit for above, unit in _MLP_UNITS if width >= above)
    stages = _stages(parameters)
    for hidden in range(step, int(2 * width) + 2 * step, step):
        heads = hidden // head_size
        if hidden >= 1024 and heads % 8:
            continue
        keys = _kv_heads(heads, parameters)
        attention = 2 * hidden * head_size * (heads + keys) + 2 * hidden
        outside = (embeddings + 1) * hidden
        depth = hidden / ratio
        stride = 4 if large else 2
        for layers in range(stride, int(2 * depth) + 12, stride):
            room = (parameters - outside) / layers - attention
            ffn = max(1, round(room / (3 * hidden) / unit)) * unit
            if not 1.5 * hidden <= ffn <= 6 * hidden:
                continue
            count = layers * (attention + 3 * hidden * ffn) + outside
            error = abs(count / parameters - 1)
            if error > tolerance:
                continue
            off = abs(math.log(layers / depth)) + 1.5 * abs(math.log(ffn / hidden / ideal_mlp))
            uneven = next((cost for by, cost in _UNEVEN if layers % (stages // by) == 0), 0.3)
            narrow = 0.1 if large and hidden % 2048 else 0.0
            yield off + 5 * error + uneven + narrow, hidden, layers, ffn, head_size


_MLP_UNITS = ((4096, 512), (512, 256), (0, 64))
"""Divisor of the MLP's size, by minimum hidden size."""

_UNEVEN = ((1, 0.0), (2, 0.05), (4, 0.15))
"""Penalty by the part of the `_stages` that divides the layers: pipelines need many divisors."""


def _stages(parameters: float) -> int:
    """Return the number of pipeline stages that the layers should divide into: 16 to 256, as many
    as the model needs. A stage of 1T / 16 parameters over 8 GPUs takes 47 of 80 GB with weights of
    16 bits and gradients of 32. Clusters often have a power of two of hosts."""
    return 16 << min(4, max(0, math.ceil(math.log2(parameters / 1e12))))


def _width_over_depth(parameters: float) -> float:
    """Return the typical hidden / layers at a size, interpolated between known sizes."""
    for (low, first), (high, second) in pairwise(_WIDTH_OVER_DEPTH):
        if parameters <= high:
            share = math.log(max(parameters, low) / low) / math.log(high / low)
            return first + (second - first) * share
    return _WIDTH_OVER_DEPTH[-1][1]


def shape_from_sizes(
    *,
    layers: int,
    hidden: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn_hidden: int | None = None,
    vocab: int | None = None,
    seq_len: int | None = None,
    experts: int = 0,
    experts_per_token: int | None = None,
) -> Shape:
    """Return the shape with these sizes, and defaults for the rest.

    Heads of 128 (or of 64 if 128 does not divide), as many key and value heads, a gated MLP
    of 8/3 hidden rounded up to 256 or a plain one of 4 hidden, 2 experts per token, 4096 tokens,
    128256 words (50304 below hidden 4096). An MLP of exactly 4 hidden with one key head per
    head is treated as GPT-3's, which is not gated.

    Raises:
        UsageError: sizes do not fit together; names the fields.
    """
    for field, value in (
        ("layers", layers),
        ("hidden", hidden),
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("ffn_hidden", ffn_hidden),
    ):
        if value is not None and value < 1:
            raise UsageError(f"`{field}={value}` is not a size", hint="at least 1")
    if heads is None:
        size = 128 if hidden % 128 == 0 else 64
        if hidden % size:
            raise UsageError(
                f"`hidden={hidden}` does not divide into heads of {size}", hint="set `heads`"
            )
        heads = hidden // size
    if hidden % heads:
        raise UsageError(
            f"`heads={heads}` does not divide `hidden={hidden}`",
            hint=f"use `hidden={max(1, round(hidden / heads / _HEAD)) * _HEAD * heads}`, or "
            f"`heads={_divisor(hidden // (1 if hidden % _HEAD else _HEAD), heads)}`",
        )
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise UsageError(
            f"`kv_heads={kv_heads}` does not divide `heads={heads}`",
            hint=f"use `kv_heads={_divisor(heads, kv_heads)}`",
        )
    chosen = _experts_per_token(experts, experts_per_token)
    gated = not (ffn_hidden == 4 * hidden and kv_heads == heads and not experts)
    if ffn_hidden is None:
        ffn_hidden = -(-8 * hidden // 768) * 256
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        vocab=vocab or (128256 if hidden >= 4096 else 50304),
        seq_len=seq_len or 4096,
        head_size=hidden // heads,
        gated=gated,
        experts=experts,
        experts_per_token=chosen,
    )


def _experts_per_token(experts: int, chosen: int | None) -> int:
    if experts < 0 or experts == 1:
        raise UsageError(
            f"`experts={experts}` is not a mixture", hint="at least 2, or 0 for a dense model"
        )
    if chosen is None:
        return min(2, experts)
    if not experts and chosen:
        raise UsageError(
            f"`experts_per_token={chosen}` without `experts`",
            hint="set how many experts there are with `experts`",
        )
    if experts and not 1 <= chosen <= experts:
        raise UsageError(
            f"`experts_per_token={chosen}` is not between 1 and `experts={experts}`",
            hint="2 and 8 are typical",
        )
    return chosen


def _divisor(whole: int, wanted: int) -> int:
    """The divisor of ``whole`` nearest to ``wanted``."""
    divisors = {d for low in range(1, math.isqrt(whole) + 1) if whole % low == 0
                for d in (low, whole // low)}  # fmt: skip
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))

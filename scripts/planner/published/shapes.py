"""The model of a published run, from its row and its model's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from dtrain.diagnostics import UsageError
from dtrain.parallelism.model.further import with_further_tokens
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape
from planner.published.rows import Row, UnusableError, count, number
from planner.published.sources import Practice


@dataclass(frozen=True, slots=True)
class Family:
    """Common properties of one model family."""

    vocab: int
    gated: bool = True
    tied: bool = False
    dropout: bool = False


_GPT = Family(50257, gated=False, tied=True, dropout=True)
"""GPT-2's tokenizer, the shared embedding and the dropout of Megatron-LM's default."""
_FAMILIES = (
    (r"llama.?4", Family(202048)),
    (r"llama.?3(?!\d)", Family(128256)),
    (r"llama|vicuna|alpaca", Family(32000)),
    (r"mistral|mixtral", Family(32000)),
    (r"qwen", Family(151936)),
    (r"deepseek.?(v3|r1)|moonlight|kimi", Family(129280)),
    (r"deepseek", Family(102400)),
    (r"internlm.?[23]", Family(92544)),
    (r"internlm", Family(103168)),
    (r"baichuan", Family(125696)),
    (r"glm", Family(65024)),
    (r"gemma", Family(256000, tied=True)),
    (r"dbrx", Family(100352)),
    (r"nemotron", Family(256000, gated=False)),
    (r"bloom", Family(250880, gated=False, tied=True)),
    (r"mpt", Family(50368, gated=False, tied=True)),
    (r"neox|pythia", Family(50432, gated=False)),
    (r"falcon", Family(65024, gated=False, tied=True)),
    (r"t-?nlg|gpt|opt|megatron|bert|\bt5\b", _GPT),
)


@cache
def family(name: str) -> Family | None:
    """The family that a model's name contains, if any."""
    found = (kind for pattern, kind in _FAMILIES if re.search(pattern, name.casefold()))
    return next(found, None)


@cache
def known(name: str) -> Shape | None:
    """The published model with that name. ``Llama-3-70B (12-layer proxy)`` is a Llama-3-70B."""
    bare = re.sub(r"\(.*?\)|\bproxy\b", "", name).strip()
    for written in (name, bare, re.sub(r"[-_ ](l\d+|instruct|base|hf|v0\.\d)$", "", bare.lower())):
        try:
            return model(written)
        except UsageError:
            continue
    return None


def shape_of(row: Row, practice: Practice, *, tensor: int) -> Shape:
    """The model, with the further tokens that it predicts.

    Raises:
        UnusableError: layers or hidden size are not known.
    """
    shape = _without_further_tokens(row, tensor=tensor, seq_len=practice.seq_len)
    return with_further_tokens(shape, _further_tokens(row, practice))


def _further_tokens(row: Row, practice: Practice) -> int:
    """As the notes say (``MTP 1``, ``no MTP``), or else as in the source's pretraining."""
    notes, name = row.get("notes", ""), row.get("model_name", "")
    if said := re.search(r"\b(no )?MTP\b ?(\d?)", notes):
        return 0 if said[1] else int(said[2] or 1)
    if re.search(r"\b(lora|sft)\b|fine.?tun", f"{row.get('id', '')} {notes}", re.IGNORECASE):
        return 0
    found = (n for pattern, n in practice.further if re.search(pattern, name, re.IGNORECASE))
    return next(found, 0)


def _without_further_tokens(row: Row, *, tensor: int, seq_len: int | None) -> Shape:
    """The row's columns, completed from the published model with its name, or from its family.

    A column always overrides the name. If both leave a value open, the family's default applies:
    the tokenizer's vocabulary, padded to a multiple of 128·t as Megatron-LM does; 4·h for plain
    MLPs and 8/3·h, rounded up to a multiple of 256, for gated ones; as many key heads as query
    heads. ``seq_len`` is used if the row has none, before the published model's.

    Raises:
        UnusableError: layers or hidden size are not known.
    """
    name = row.get("model_name") or ""
    base, kind = known(name), family(name)
    # Another model may have the same name, such as GPT 7B. Require the same width, too.
    if base is not None and count(row, "hidden") not in (None, base.hidden):
        kind = kind or Family(base.vocab, base.gated, base.tied, base.dropout)
        base = None

    def chosen(column: str, attribute: str = "") -> int | None:
        other = getattr(base, attribute or column) if base is not None else None
        return count(row, column) or other or None

    layers, hidden = chosen("layers"), chosen("hidden")
    if layers is None or hidden is None:
        raise UnusableError("the model's shape is not given")
    notes = row.get("notes", "")
    heads = chosen("heads") or max(1, hidden // 128)
    same_heads = base is not None and heads == base.heads
    noted = re.search(r"\bhead size (\d+)", notes)
    head_size = base.head_size if base is not None and same_heads else max(1, hidden // heads)
    head_size = int(noted[1]) if noted else head_size
    # A typing error, not a model: no estimate would end.
    if layers > 2000 or hidden > 10**6 or heads > hidden:
        raise UnusableError("the model's shape is not possible")
    kv_heads = count(row, "kv_heads") or (base.kv_heads if base and same_heads else heads)
    vocab = count(row, "vocab") or _padded(
        base.vocab if base is not None else kind.vocab if kind else 50257, 128 * tensor
    )
    experts = chosen("moe_experts", "experts") or 0
    if experts == 1:
        experts = 0
    topk = min(chosen("moe_topk", "experts_per_token") or 2, experts)
    if "padded to the fullest" in notes:
        # Early in training, that one gets nearly all tokens, so each expert computes as many.
        topk = experts
    length = count(row, "seq_len") or seq_len or (base.seq_len if base is not None else 2048)
    block = r"\bparallel (?:transformer )?(?:block|layer|residual)"
    parallel = re.search(block, notes, re.IGNORECASE) is not None
    shared = re.search(r"\b(\d+) shared experts?", notes)
    dense = re.search(r"\b(\d+) dense layers? of (\d+)", notes)
    ffn = chosen("ffn_hidden")
    if base is not None and ffn == base.dense_ffn_hidden:
        ffn = base.ffn_hidden  # the width of the few dense layers, not of the experts

    def shape_with(*, gated: bool, tied: bool) -> Shape:
        usual = -(-8 * hidden // 768) * 256 if gated else 4 * hidden
        plain = base or Shape(
            layers, hidden, heads, kv_heads, ffn or usual, vocab, length, head_size,
            dropout=kind.dropout if kind else not gated,
        )  # fmt: skip
        return replace(
            plain,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            ffn_hidden=ffn or usual,
            vocab=vocab,
            seq_len=length,
            dropout=(plain.dropout or "hidden dropout" in notes) and "no dropout" not in notes,
            gated=gated,
            tied=tied,
            experts=experts,
            experts_per_token=topk,
            shared_experts=int(shared[1]) if shared else plain.shared_experts,
            dense_layers=min(int(dense[1]) if dense else plain.dense_layers, layers - 1),
            dense_ffn_hidden=int(dense[2]) if dense else plain.dense_ffn_hidden,
            parallel=plain.parallel or parallel,
        )

    if base is not None:
        gated, tied = base.gated, base.tied and not re.search(r"\buntied\b", row.get("notes", ""))
    elif kind is not None:
        gated, tied = kind.gated, kind.tied
    else:
        gated = bool(experts) or kv_heads != heads or (ffn is not None and ffn != 4 * hidden)
        gated, tied = _agreeing(
            row, shape_with, [(gated, not gated), (True, False), (False, True), (True, True)]
        )
        return shape_with(gated=gated, tied=tied)
    gated, tied = _agreeing(row, shape_with, [(gated, tied), (gated, not tied)])
    return shape_with(gated=gated, tied=tied)


def _agreeing(
    row: Row, shape_with: Callable[..., Shape], choices: list[tuple[bool, bool]]
) -> tuple[bool, bool]:
    """The choice of a gated MLP and of tied embeddings that matches the printed number of
    parameters, if exactly one does; else the first, which is usual."""
    printed = number(row, "params_b")
    if printed is None:
        return choices[0]
    # 7.1 means from 7.05 to 7.15.
    digits = len((row.get("params_b") or "").strip().partition(".")[2])
    slack = 0.5 * 10.0**-digits + 1e-9
    fitting = [
        (gated, tied)
        for gated, tied in dict.fromkeys(choices)
        if abs(shape_with(gated=gated, tied=tied).parameters / 1e9 - printed) <= slack
    ]
    return fitting[0] if len(fitting) == 1 else choices[0]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

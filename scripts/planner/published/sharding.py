"""How a published run shards its states, and the buffers of that."""

from __future__ import annotations

import re

from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout, Sharding
from planner.published.rows import Row, count
from planner.published.sources import Practice

_SHARDINGS: tuple[tuple[str, Sharding], ...] = (
    (r"hsdp|hybrid", "hybrid"),
    (r"grad_op|gradients|zero.?2|stage.?2|os\+g", "gradients"),
    (r"zero.?3|stage.?3|fsdp|full|zero\+\+", "full"),
    (r"zero.?1|stage.?1|optimizer|dist.?opt|zero", "optimizer"),
    (r"none|^no\b|ddp|replicat|zero.?0|^0$", "none"),
)


def sharding_of(row: Row, practice: Practice) -> Sharding:
    text = row.get("sharding", "").casefold()
    if text:
        for pattern, sharding in _SHARDINGS:
            if re.search(pattern, text):
                if sharding == "gradients" and keeps_gathered(row, practice):
                    return "full"
                unsharded = sharding == "none" and practice.always_shards
                bf16 = "bf16" in row.get("precision", "").casefold()
                return "optimizer" if unsharded and bf16 else sharding
    if count(row, "n_gpus") == 1:
        return "none"
    return practice.sharding


def keeps_gathered(row: Row, practice: Practice) -> bool:
    """Whether FSDP frees gathered parameters only after the backward pass: ``SHARD_GRAD_OP``."""
    text = f"{row.get('source', '')} {row.get('id', '')} {row.get('notes', '')}"
    zero_2 = re.search(r"grad_op|zero-?2", row.get("sharding", ""), re.IGNORECASE)
    fsdp = practice.backend == "torchtitan" and re.search("FSDP", text) is not None
    return "reshard_after_forward=False" in text or (fsdp and zero_2 is not None)


def buckets(row: Row, practice: Practice, shape: Shape, layout: Layout) -> float:
    """As in `MemoryHabits`. ``overlap_comm`` has two of them. If the optimizer is on the host,
    ZeRO-1 and 2 send each gradient there through a buffer of 16 bits, and compute its norm in 64
    (``set_norm_for_param_grad_in_gpu`` in DeepSpeed's ``stage_1_and_2.py``)."""
    found = practice.habits.buckets * (2 if "overlap_comm" in row.get("notes", "") else 1)
    if found and layout.offload:
        found += (2 + 8) * shape.hidden * max(shape.vocab, shape.ffn_hidden) / GIB
    return found

"""Where the experts of a published run are, and how tokens reach them."""

from __future__ import annotations

import re

from planner.published.rows import Row, count, noted
from planner.published.sources import Practice


def expert_ranks(row: Row, practice: Practice) -> int:
    """The ranks of the same tensor rank that share the experts. Whole ones are on ``ep`` ranks of
    any tensor rank."""
    every, tensor = count(row, "ep") or 1, count(row, "tp") or 1
    whole = whole_experts(row, practice) and every % tensor == 0
    return every // tensor if whole else every


def whole_experts(row: Row, practice: Practice) -> bool:
    """Whether experts are whole: as the notes say (ETP 1), or else the software's default. There
    are never more ranks of parts than GPUs in a pipeline stage."""
    if parts := noted(row.get("notes", ""), r"\bETP\s*[=:]?\s*(\d+)"):
        return parts == 1
    tensor, expert = count(row, "tp") or 1, count(row, "ep") or 1
    gpus = count(row, "n_gpus") or 0
    too_few = 0 < gpus < tensor * expert * (count(row, "pp") or 1)
    return practice.whole_experts or too_few


def sends_copies(text: str) -> bool | None:
    """Whether the dispatcher that a row names, if any, sends a token to each expert."""
    if re.search(r"all-?to-?all dispatcher", text, re.IGNORECASE):
        return True
    return False if re.search(r"(Deep|Hybrid)EP", text) else None


def capacity(text: str) -> float:
    """As in `Assumptions`. The factor is 1 unless the notes give it."""
    found = re.search(r"padded to capacity(?: factor (\d+(?:\.\d+)?))?", text)
    return float(found[1] or 1) if found else 0.0

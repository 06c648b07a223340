"""The summary that torchrun writes when a rank fails. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from dtrain.failures.cause import Failure, signal_name

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.{0,500}?\brank +: (\d{1,6}) .{0,200}?"
    r"exitcode +: (-?\d{1,3})\b",
    re.DOTALL,
)


def root_rank(failure: Failure, stderr: str) -> Failure:
    """The rank that torchrun blames in its summary, in place of torchrun."""
    root = _ROOT_CAUSE.search(stderr) if failure.role == "torchrun" else None
    if root is None:
        return failure
    rank, code = int(root[1]), int(root[2])
    return replace(
        failure,
        role="worker",
        index=rank,
        rank=rank,
        code=code if code >= 0 else None,
        signal=signal_name(-code),
    )

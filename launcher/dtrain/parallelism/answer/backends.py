"""Compare the best layout of the requested backend with those of other backends."""

from __future__ import annotations

from dtrain.parallelism.answer.explain import brief, faster, seconds
from dtrain.parallelism.backends import BACKENDS, without_backend
from dtrain.parallelism.question import Answer

WORTH = 0.02
"""Smaller gains, as shares of a step, are not shown: the estimates' error is larger."""


def gain(answer: Answer) -> str:
    """Return one line on the fastest other backend; '' if none is faster."""
    question = answer.question
    chosen = question.backend != "runtime" and not question.backend_required
    # A backend that the planner has chosen is the fastest.
    best = None if chosen or not question.others else question.others[0].best
    if best is None or without_backend(question.cluster.gpu):
        return ""
    name = best.layout.backend
    # What a trial has corrected may be true of all software.
    total = best.time.total * answer.best.slowdown
    what = f"`backend={name!r}` ({BACKENDS[name].title})"
    if not answer.fits:
        return f"{what} fits: {brief(best)}, {seconds(total)} a step"
    ratio = answer.best.time.total / total
    if ratio - 1 < WORTH:
        return ""
    return f"{what} would be {faster(ratio)}: {brief(best)}, {seconds(total)} a step"

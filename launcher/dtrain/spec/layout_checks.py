"""Whether the parts of a complete layout go together."""

from __future__ import annotations

from dtrain.runtime.layout import Layout
from dtrain.spec.problems import Problems
from dtrain.spec.schema import Section


def check_parts(strategy: str | None, layout: Layout, given: Section, problems: Problems) -> None:
    """Report every contradiction; ``given`` is ``job.layout``, which has their places."""
    _check_sharding(layout, given, problems)
    _check_expert(layout, given, problems)
    _check_in_vain(layout, given, problems)
    if layout.pipeline > 1 and strategy != "none":
        _check_schedule(layout, given, problems)


def _check_sharding(layout: Layout, given: Section, problems: Problems) -> None:
    if layout.sharding != "none" and layout.data * layout.context == 1:
        problems.add(
            f"sharding is {layout.sharding}, but there is one data rank: nothing to share it with",
            given.place("sharding"),
            "remove sharding, or set data to more than 1",
        )
    if "shard" not in given:
        return
    if layout.sharding != "hybrid":
        problems.add(
            f"shard has no effect with 'sharding: {layout.sharding}'",
            given.key_place("shard"),
            "remove it, or use 'sharding: hybrid', whose groups it sizes",
        )
    elif layout.data % (layout.shard or 1):
        problems.add(
            f"shard is {layout.shard}, which does not divide the {layout.data} data ranks",
            given.place("shard"),
            "shard has to divide data",
        )


def _check_expert(layout: Layout, given: Section, problems: Problems) -> None:
    ranks = layout.data * layout.context
    if ranks % layout.expert:
        problems.add(
            f"expert is {layout.expert}, which does not divide the {ranks} data and "
            "context ranks that it is taken from",
            given.place("expert"),
            "expert has to divide data x context",
        )


def _check_in_vain(layout: Layout, given: Section, problems: Problems) -> None:
    """Keys that do nothing without a size of more than 1."""
    for key, in_use, size, effect in (
        (
            "sequence_parallel",
            layout.sequence_parallel,
            "tensor",
            "splits what tensor parallelism leaves whole",
        ),
        (
            "virtual_pipeline",
            layout.virtual_pipeline > 1,
            "pipeline",
            "cuts the stages of a pipeline into pieces",
        ),
        ("schedule", True, "pipeline", "orders the micro-batches of a pipeline"),
    ):
        if key in given and in_use and getattr(layout, size) == 1:
            problems.add(
                f"{key} {effect}, but {size} is 1",
                given.key_place(key),
                f"remove it, or set {size} to more than 1",
            )


def _check_schedule(layout: Layout, given: Section, problems: Problems) -> None:
    """What PyTorch's schedules can do; a script of ``strategy: none`` may have others."""
    schedule, pieces = layout.schedule, layout.virtual_pipeline
    if schedule.startswith("zb-") and layout.data > 1:
        problems.add(
            f"the schedule {schedule} trains wrongly with {layout.data} data ranks: it splits the "
            "backward pass, and FSDP and DDP then average gradients that are not complete",
            given.place("schedule"),
            "use 'schedule: 1f1b', or pipeline alone (pytorch/pytorch#144530)",
        )
    if schedule == "zb-v" and pieces != 2:
        problems.add(
            f"the schedule zb-v is for 2 pieces of each stage, but virtual_pipeline is {pieces}",
            given.place("virtual_pipeline"),
            "set virtual_pipeline to 2, or use 'schedule: zb-1p'",
        )
    if schedule.startswith("zb-") and layout.recompute != "none":
        problems.add(
            f"the schedule {schedule} splits the backward pass, and both parts would compute the "
            "same activations again",
            given.place("recompute"),
            "remove recompute, or use 'schedule: 1f1b'",
        )


def check_rounds(layout: Layout, given: Section, problems: Problems) -> None:
    """Report micro-batches that an interleaved schedule cannot go round its stages with."""
    interleaved = layout.virtual_pipeline > 1 or layout.schedule == "zb-1p"
    if interleaved and layout.grad_accumulation % layout.pipeline:
        problems.add(
            f"{layout.grad_accumulation} micro-batches do not make whole rounds of the "
            f"{layout.pipeline} stages, which an interleaved schedule needs",
            given.place("grad_accumulation"),
            f"make grad_accumulation a multiple of {layout.pipeline}",
        )

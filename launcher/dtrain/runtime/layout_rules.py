"""Rules that every layout must meet.

The cluster file, the planner and the training runtime share them. Rules that depend on the hosts or
on the model are in other modules. Python 3.8 can read this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dtrain.runtime.layout import Layout


class MisfitError(ValueError):
    """A layout that cannot be launched.

    ``key`` is the key of ``job.layout`` to change, or ``layout``, ``strategy`` or ``global_batch``.
    ``unused``: the key has no effect, whatever its value.
    """

    def __init__(self, key: str, message: str, hint: str, *, unused: bool = False) -> None:
        super().__init__(message)
        self.key = key
        self.message = message
        self.hint = hint
        self.unused = unused


def contradictions(layout: Layout, name: Callable[[str], str] = str) -> Iterator[MisfitError]:
    """Every pair of fields that contradict each other, for any framework.

    ``name`` returns how to write a field, for example in quotes.
    """
    copies = layout.copies
    ranks = f"{copies} data{' and context' * (layout.context > 1)} rank{'s' * (copies > 1)}"
    if layout.sharding != "none" and copies == 1:
        yield MisfitError(
            "sharding",
            f"{name('sharding')} is {layout.sharding}, but there is only one data rank",
            f"remove {name('sharding')}"
            + f", or reduce {name('tensor')} or {name('pipeline')}" * (layout.world_size > 1),
        )
    if layout.shard is not None and layout.sharding != "hybrid":
        yield MisfitError(
            "shard",
            f"shard has no effect with 'sharding: {layout.sharding}'",
            "remove it, or use 'sharding: hybrid': it sets the size of those groups",
            unused=True,
        )
    elif layout.shard is not None and copies % layout.shard:
        yield MisfitError(
            "shard",
            f"shard is {layout.shard}, which does not divide the {ranks}",
            f"use a divisor of {copies}",
        )
    if copies % layout.expert:
        yield MisfitError(
            "expert",
            f"{name('expert')} is {layout.expert}, which does not divide the {ranks}",
            f"use a divisor of {copies}",
        )
    elif layout.shards % layout.expert and layout.expert % layout.shards:
        yield MisfitError(
            "expert",
            f"{name('expert')} is {layout.expert}, but {layout.shards} ranks share one copy of the "
            "states; one must divide the other",
            "change shard or expert",
        )
    for key, used, size, effect in (
        (
            "sequence_parallel",
            layout.sequence_parallel,
            "tensor",
            "splits activations that tensor parallelism replicates",
        ),
        (
            "virtual_pipeline",
            layout.virtual_pipeline > 1,
            "pipeline",
            "splits the stages of a pipeline",
        ),
        (
            "schedule",
            layout.schedule != Layout.schedule,
            "pipeline",
            "orders the micro-batches of a pipeline",
        ),
    ):
        if used and getattr(layout, size) == 1:
            yield MisfitError(
                key,
                f"{name(key)} {effect}, but {name(size)} is 1",
                f"remove it, or set {name(size)} to more than 1",
                unused=True,
            )


def uneven_rounds(layout: Layout) -> Iterator[MisfitError]:
    """Micro-batches that an interleaved schedule cannot group by pipeline ranks."""
    if layout.grad_accumulation % layout.round_size:
        yield MisfitError(
            "grad_accumulation",
            f"{layout.grad_accumulation} micro-batches do not make whole rounds of the "
            f"{layout.pipeline} stages, which an interleaved schedule needs",
            f"make grad_accumulation a multiple of {layout.pipeline}",
        )


def torch_limits(layout: Layout) -> Iterator[MisfitError]:
    """Limits of PyTorch's schedules. Other frameworks may not have them."""
    schedule = layout.schedule
    if layout.offload_activations and layout.recompute != "none":
        yield MisfitError(
            "offload_activations",
            f"offload_activations does not move what 'recompute: {layout.recompute}' keeps",
            "remove one of the two",
            unused=True,
        )
    if layout.expert > 1 and layout.recompute == "selective":
        yield MisfitError(
            "recompute",
            "PyTorch cannot recompute a layer selectively if FSDP gathers its experts apart",
            "use 'recompute: full' or none, or expert 1",
        )
    if layout.pipeline == 1 or not schedule.startswith("zb-"):
        return
    if layout.copies > 1:
        # The weights' part of their backward pass bypasses autograd's hooks.
        yield MisfitError(
            "schedule",
            f"the schedule {schedule} trains wrongly with {layout.copies} data ranks: it splits "
            "the backward pass, and FSDP and DDP then average incomplete gradients",
            "use 'schedule: 1f1b', or only pipeline parallelism (pytorch/pytorch#144530)",
        )
    if schedule == "zb-v" and layout.virtual_pipeline != 2:
        yield MisfitError(
            "virtual_pipeline",
            "the schedule zb-v needs 2 pieces of each stage, but virtual_pipeline is "
            f"{layout.virtual_pipeline}",
            "set virtual_pipeline to 2, or use 'schedule: zb-1p'",
        )
    if layout.recompute != "none":
        yield MisfitError(
            "recompute",
            f"the schedule {schedule} splits the backward pass, and both parts would recompute "
            "the same activations",
            "remove recompute, or use 'schedule: 1f1b'",
        )

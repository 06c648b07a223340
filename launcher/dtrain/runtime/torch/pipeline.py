"""Pipeline parallelism: a model's stages, and the schedules that run them.

A stage is the whole model, with the parts of other stages replaced by modules that pass their input
through. So every stage uses the model's own ``forward``, and every parameter keeps its name: a
checkpoint does not depend on the pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from dtrain.runtime.layout import Layout, layers_of_stages
from dtrain.runtime.torch.anatomy import Anatomy

_Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class PassThrough(nn.Module):
    """Replaces a part of the model that another stage has."""

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """``x`` itself."""
        return x


def stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """The stages of pipeline rank ``rank``: in rounds, or down and up for zb-v."""
    ranks = layout.pipeline
    if layout.schedule == "zb-v":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(layout.virtual_pipeline)]


def owners_of_stages(layout: Layout) -> list[int]:
    """The pipeline rank that holds each stage."""
    owners = {
        stage: rank for rank in range(layout.pipeline) for stage in stages_of_rank(layout, rank)
    }
    return [owners[stage] for stage in sorted(owners)]


def parts_of_stages(anatomy: Anatomy, stages: int) -> list[list[str]]:
    """Names of each stage's parts, see `layers_of_stages`.

    Raises ValueError if there are fewer blocks than stages.
    """
    blocks = anatomy.blocks
    if len(blocks) < stages:
        raise ValueError(
            f"{len(blocks)} blocks cannot fill {stages} pipeline stages; use fewer stages"
        )
    parts: list[list[str]] = []
    taken = 0
    for count in layers_of_stages(len(blocks), stages):
        parts.append(list(blocks[taken : taken + count]))
        taken += count
    return [[*anatomy.before, *parts[0]], *parts[1:-1], [*parts[-1], *anatomy.after]]


def refuse_what_cannot_be_staged(model: nn.Module, anatomy: Anatomy, ties: dict[str, str]) -> None:
    """Raise ValueError if the model's stages would compute something different from the model."""
    if ties:
        one, other = next(iter(ties.items()))
        raise ValueError(
            f"{one} is tied to {other}, but a pipeline puts them on different stages; untie them,"
            " or use a layout with pipeline 1"
        )
    received, given_on = _through_no_module(model, anatomy)
    # An empty stage must return its input. A change on the way is a computation outside all
    # modules, which every stage would repeat.
    if isinstance(given_on, Exception):
        raise ValueError(
            f"{type(model).__name__}.forward() computes between its modules, or needs the tokens:"
            " each pipeline stage runs it, all but the first on (batch, sequence, hidden), and that"
            f" fails ({type(given_on).__name__}: {given_on}): move positions, scales and code that"
            " reads the tokens' shape into the blocks or into the embedding module"
        ) from given_on
    if given_on is not received:
        raise ValueError(
            f"{type(model).__name__}.forward() computes between its modules, and every pipeline"
            " stage would repeat that: move positions, scales and residual additions into the"
            " blocks or into the embedding module"
        )


def refuse_frozen_start(model: nn.Module, layout: Layout, first: Collection[str]) -> None:
    """Raise ValueError if nothing in the ``first`` stage's parts is trained, but a zero-bubble
    schedule needs it: it computes the gradients of a later stage's weights from those of the
    stage's input, and a frozen stage's output has none."""
    trained = any(p.requires_grad for part in first for p in model.get_submodule(part).parameters())
    if layout.schedule.startswith("zb-") and not trained:
        raise ValueError(
            f"the schedule {layout.schedule} would not train the stages behind a frozen first stage"
            f" ({', '.join(first)}): use 'schedule: 1f1b'"
        )


def returns_its_output_layer(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether ``model`` computes nothing outside of its modules, not even on its last output."""
    received, given_on = _through_no_module(model, anatomy)
    return given_on is received


def _through_no_module(model: nn.Module, anatomy: Anatomy) -> tuple[Tensor, Any]:
    """A stream, and what ``model`` without its parts returns for it, or the error it raises."""
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    received = torch.zeros(1, 8, 8, device="meta" if on_meta else "cpu")
    try:
        return received, take_stage(model, (), anatomy)(received)
    except Exception as error:  # noqa: BLE001 - it is the user's code, and may raise anything
        return received, error


def take_stage(model: nn.Module, parts: Collection[str], anatomy: Anatomy) -> nn.Module:
    """A stage with only ``parts`` of ``model``. The modules are shared, not copied."""
    all_parts = {*anatomy.around, *anatomy.blocks}

    def take(module: nn.Module, name: str) -> nn.Module:
        if name in all_parts:
            return module if name in parts or _is_table(module) else PassThrough()
        taken = copy.copy(module)
        # Otherwise the rank's stages would share hooks and buffers.
        for key in vars(nn.Module()):
            if isinstance(registered := getattr(module, key, None), dict):
                setattr(taken, key, registered.copy())
        taken._modules = {
            key: child if child is None else take(child, f"{name}.{key}" if name else key)
            for key, child in module._modules.items()
        }
        return taken

    return take(model, "")


def _is_table(module: nn.Module) -> bool:
    """Whether every stage may need ``module``: a table, such as one of rotary angles."""
    owns_parameters = any(True for _ in module.parameters())
    return not owns_parameters and any(True for _ in module.buffers())


def build_schedule(
    layout: Layout,
    stages: Mapping[int, nn.Module],
    group: dist.ProcessGroup,
    device: torch.device,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> _Schedule:
    """The schedule of a pipeline rank that holds ``stages``, by number."""
    count = layout.pipeline * len(stages)
    parts = [
        PipelineStage(stage, number, count, device, group=group) for number, stage in stages.items()
    ]
    batches = layout.grad_accumulation
    if layout.schedule == "zb-v":
        return ScheduleZBVZeroBubble(parts, batches, loss)  # type: ignore[arg-type]
    if layout.schedule == "zb-1p":
        return ScheduleInterleavedZeroBubble(parts, batches, loss)  # type: ignore[arg-type]
    if len(parts) == 1:
        single = ScheduleGPipe if layout.schedule == "gpipe" else Schedule1F1B
        return single(parts[0], batches, loss)
    multi = ScheduleLoopedBFS if layout.schedule == "gpipe" else ScheduleInterleaved1F1B
    return multi(parts, batches, loss)  # type: ignore[arg-type]


def send(stream: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send the output of a stage to pipeline rank ``to``, which calls `receive`."""
    shape = [(tuple(stream.shape), stream.dtype)]
    dist.send_object_list(shape, group=group, group_dst=to, device=torch.device("cpu"))
    dist.send(stream.contiguous(), group=group, group_dst=to)


def receive(source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Receive a tensor from pipeline rank ``source``."""
    shape: list[Any] = [None]
    dist.recv_object_list(shape, group=group, group_src=source, device=torch.device("cpu"))
    size, dtype = shape[0]
    stream = torch.empty(size, dtype=dtype, device=device)
    dist.recv(stream, group=group, group_src=source)
    return stream

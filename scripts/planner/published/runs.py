"""Converts published training runs to the planner's terms.

A row of the CSV files is what a public table reports about one measured run: model, GPUs, layout,
and results. Blank cells are filled by rules that hold for all rows of a source: from the row's
notes, the model's name (``shapes``), the defaults of that source's software at the time
(``sources.PRACTICES``), or the machine in which the GPU usually comes.

The columns:

- ``n_gpus``, ``tp``, ``pp``, ``cp``: blank means 1, but a blank ``n_gpus`` is their product. Data
  ranks are n / (tp·pp·cp); ``dp`` is needed only if ``n_gpus`` does not determine it. Experts are
  spread over data ranks, so ``ep`` does not count.
- ``micro_batch``: blank means 1. ``global_batch``: if blank, the notes give the micro-batches of a
  step (``mbc=``, ``micro_num``, ``grad_accum=``). Otherwise a rate such as tokens/s is still
  comparable, with four micro-batches for each pipeline stage, but a step time is not. JAX has one
  micro-batch of four sequences, or of as many as fit.
- ``sharding``: DDP is none; ZeRO-1 and the distributed optimizer are ``optimizer``; ZeRO-2 and
  SHARD_GRAD_OP ``gradients``; ZeRO-3 and FSDP ``full``; HSDP ``hybrid``. Blank is the default of
  the source's software.
- ``precision``: nvfp4, fp8, bf16, fp16 or fp32, in this order, if the cell names it. Gradients have
  16 bits with fp16, with MosaicML's PURE and in NeMo. ``bf16-true`` means that all states have 16.
- ``moe_experts``: routed ones. Notes such as ``2 shared experts`` give those for every token, ``1
  dense layer of 13312`` the first layers without experts. ``head size 128`` is that of attention.
- Notes name the version of flash attention (``flash attention 2``), if it is not that of the
  source's software, ``CUDA_LAUNCH_BLOCKING=1``, and a ``CUDA graph of the whole step``.
- Notes say that experts are ``padded to capacity`` (``factor 1.25``), so that the host never waits
  for their tokens, or that they get equally many (``forced load balancing``, ``even routing``).
  In MaxText, ``dropless experts`` have room for all tokens of all ranks.
  Otherwise the routers are those of first steps. With torchtitan's selective recomputation, they
  may say that it ``exchanges tokens again``.
- LoRA, if the source or the id has this word; notes such as ``LoRA rank 32 on all matrices`` and
  ``frozen matrices in 4 bits`` say which; ``GPTQ`` that a kernel for each operation expands these.
- Notes name the further tokens that a model predicts (``MTP 1``, ``no MTP``).
- The loss is computed at once, unless the notes say ``loss in N chunks`` or name Liger's kernels.
- Notes also say what differs in memory: ``Triton kernels for loss and norms and SwiGLU``,
  ``reshard_after_forward=False``, ``mem_efficient_linear=False``, ``gathered in fp32``, ``the loop
  holds the outputs``, ``hidden dropout``, ``no dropout``, ``Adam's moments in bf16``, ``16 bits of
  master weights``, ``no master weights``, ``Adafactor``, ``overlap_comm``, ``norms not fused``.
- ``recompute``: full, uniform, block or just yes mean full. Notes say if ``selective means
  core_attn``, Megatron-Core's default. If selective recomputation includes
  ``moe``, or is ``checkpointing of some blocks`` or ``recomputes ffn``, the run fits if full
  recomputation does. Blank
  is the default of the source's software if it has one (torchtitan: selective), or else
  none, or what the run needs to fit its GPUs; the same holds for ``sharding``, and for ``tp``
  if no column gives a split. Then the planner's answer to "does it fit" is yes if one of these
  layouts fits.
- ``vpp``: blank means 1, unless the notes say ``chunks of a stage not stated``.
- ``interconnect``: Gb/s of all NICs of one host. ``8x200Gb/s`` is 1600, ``400Gb/s per GPU`` counts
  for each GPU, a machine's name or a blank means that machine. An InfiniBand rate without a unit of
  reference is the rate of one NIC.
- ``reported_*``: see ``results``. A row whose notes start with OOM did not fit, nor did one whose
  notes say ``memory ended``. Every other row with a result did fit, if the memory of its GPU is
  known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.memory import memory
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout
from planner.published.hardware import cluster_of, gpu_of
from planner.published.layouts import (
    assumptions_of,
    between,
    choices,
    is_given,
    layout_of,
    lora_of,
    loss_chunks,
    scheduled,
)
from planner.published.results import has_rate, memory_of, seconds_of
from planner.published.rows import Row, UnusableError, rows
from planner.published.shapes import shape_of
from planner.published.sharding import buckets
from planner.published.sources import Counter, origin, practice_of

TOO_LARGE = 0.2
"""Share by which a run's estimate may exceed its GPU's memory before its blank cells are read
otherwise: Megatron-LM can recompute a few layers or modules only, and estimates have errors."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One measured run."""

    name: str
    publisher: str
    """Who measured it. Held-out tests leave out all runs of a publisher."""
    table: str
    """The publisher's table that contains the run."""
    shape: Shape
    layout: Layout
    assumed: Assumptions
    cluster: GpuCluster
    seconds: float | None
    """Seconds of one step with the layout's global batch."""
    memory: float | None
    """Peak memory in GiB."""
    counter: Counter
    fitted: bool | None
    """Whether it ran without running out of memory; None if the GPU's memory is unknown."""
    possible: tuple[Layout, ...] = ()
    """All layouts that the row's cells allow."""
    given: bool = False
    """Whether the row gives the layout and the batch, as `is_given` says."""

    def candidate(self, efficiency: Efficiency) -> Candidate:
        """The planner's estimate."""
        return Candidate(self.shape, self.layout, self.cluster, efficiency, self.assumed)

    def fits(self, efficiency: Efficiency) -> bool:
        """Whether the planner says that the run fits: one of the layouts that its row allows."""
        return any(
            Candidate(self.shape, layout, self.cluster, efficiency, self.assumed).fits
            for layout in (self.layout, *self.possible)
        )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that cannot be compared with an estimate."""

    name: str
    reason: str


def read(path: Path) -> Iterator[PublishedRun | Skipped]:
    """The runs of a file, in order.

    Raises:
        UsageError: as ``rows`` does.
    """
    for row in rows(path):
        try:
            yield run_of(row)
        except UnusableError as error:
            yield Skipped(row.get("id", ""), str(error))


def run_of(row: Row) -> PublishedRun:
    """Convert a row to the planner's terms.

    Raises:
        UnusableError: the row cannot be compared with an estimate. The reason groups such rows.
    """
    notes, source = row.get("notes", ""), row.get("source", "")
    practice = practice_of(row)
    gpu = gpu_of(row.get("gpu_type", ""), row.get("interconnect", ""))
    gpu = replace(gpu, sustained=gpu.sustained * practice.sustained)
    layout, known_batch = layout_of(row, practice)
    assumed = assumptions_of(row, practice, gpu)
    shape = shape_of(row, practice, tensor=layout.tensor)
    shape = replace(shape, lora=lora_of(row, practice, assumed.precision))
    habits = replace(assumed.habits, buckets=buckets(row, practice, shape, layout))
    assumed = replace(assumed, loss_chunks=loss_chunks(row, shape), habits=habits)
    if layout.pipeline > shape.layers:
        raise UnusableError("the pipeline has more stages than the model has layers")
    layout = scheduled(row, layout, shape)
    cluster = cluster_of(row, gpu, layout)
    publisher, table = origin(source)
    failed = re.match(r"\W*(oom\b|out of memory)", notes, re.IGNORECASE) is not None
    possible = tuple(choices(row, layout, practice))
    layout = _fitting(possible, shape, assumed, cluster)
    seconds = None if failed else seconds_of(row, practice, shape, layout, assumed, cluster)
    no_batch = seconds is not None and not known_batch and not has_rate(row)
    if no_batch:
        seconds = None
    peak, counter = (None, practice.counter) if failed else memory_of(row, practice)
    if not failed and seconds is None and peak is None:
        raise UnusableError(
            "the global batch of a step time is not given" if no_batch else "nothing is reported"
        )
    unsaid = re.search(
        r"(memory size|recomput|\bremat\b)[^;.]*not (stated|printed)", notes, re.IGNORECASE
    ) or re.fullmatch(
        # These were sold with 40 or 80, and with 16 or 32 GB.
        r"(nvidia\W*)?(a100|v100)\W*(sxm\d?|pcie)?",
        row.get("gpu_type", ""),
        re.IGNORECASE,
    )
    # The planner does not model activations and parameters that move to host memory, nor those that
    # a user's own code keeps in 4 bits.
    host = (
        r"activation\w* (cpu )?offload\s*=\s*(true|yes|1)|parameters on the host"
        r"|activations in 4 bits"
    )
    moved = re.search(host, notes, re.IGNORECASE)
    return PublishedRun(
        name=row.get("id", ""),
        publisher=publisher,
        table=table,
        shape=shape,
        layout=layout,
        assumed=assumed,
        cluster=cluster,
        seconds=seconds,
        memory=None if moved else peak,
        counter=counter,
        fitted=None if unsaid or moved else not (failed or "memory ended" in notes),
        possible=possible + between(row, layout),
        given=is_given(row, shape, layout, known_batch=known_batch),
    )


def _fitting(
    layouts: Iterable[Layout], shape: Shape, assumed: Assumptions, cluster: GpuCluster
) -> Layout:
    """The first layout that fits the GPU's memory; the one with the least memory if none does.
    People choose what fits. Whether the run itself did is not used: that tests the planner."""
    every = [(memory(shape, one, assumed).total, one) for one in layouts]
    limit = cluster.gpu.memory * (1 + TOO_LARGE)
    least = min(every, key=lambda pair: pair[0])
    return next((one for gib, one in every if gib <= limit), least[1])

"""The time of what data ranks do in a step: they exchange parameters and gradients, and update."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from dtrain.parallelism.backends import backend_of, keeps_stage, reduces_each_micro_batch
from dtrain.parallelism.cost.collectives import Group, exposed
from dtrain.parallelism.cost.keyed import KeyedCosts
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.stages import adapters_of_stage, parameters_of_stage, stage_layers
from dtrain.records import cached_property

PCIE = 20e9
"""Bytes/s of one GPU to its host's memory and back (PCIe 4.0 x16, sustained)."""
PAGEABLE = PCIE / 2
"""The same to memory that is not pinned: the copy goes through a pinned buffer. An estimate."""
HOST_MEMORY = 100e9
"""Bytes/s that all processors of a host sustain together while they update parameters. DeepSpeed's
Adam reaches 50 (Qwen 72B on four hosts takes 10 s, its issue 6834) to 110 (Llama 2 7B on one host
takes under 2 s, jzhang38/EasyContext)."""


class BetweenSteps(NamedTuple):
    """Seconds of a step of the rank with the most parameters."""

    traffic: float
    """Of exchanges that can overlap with the computation."""
    late: float
    """Of exchanges that cannot."""
    optimizer: float
    hiding: float
    """Share of the computation that ``traffic`` can overlap with."""
    share: float
    """Seconds that a second of overlapped traffic adds to the step."""

    def exposed(self, busy: float) -> float:
        """Return the seconds that exchanges add to a step that computes for ``busy`` seconds."""
        return self.late + exposed(self.traffic, busy * self.hiding, self.share)


class DataRanks(KeyedCosts):
    """Computes `BetweenSteps`. It is the same for layouts that differ only in how they compute a
    layer."""

    layout_fields = attrgetter(
        "backend", "tensor", "pipeline", "virtual_pipeline", "context", "data", "expert",
        "sharding", "shard", "offload", "reduce", "grad_accumulation",
    )  # fmt: skip

    @cached_property
    def _layers(self) -> int:
        """Layers of the stage with the most."""
        return max(stage_layers(self.shape, self.layout))

    @cached_property
    def _parameter(self) -> int:
        """Bytes of a trained parameter that ranks gather."""
        narrow = self.assumed.precision in ("fp8", "nvfp4") and backend_of(self.layout).gathers_fp8
        return 1 if narrow else BYTES[self.assumed.precision]

    @cached_property
    def _gradient(self) -> int:
        """Bytes of a parameter's gradient that ranks exchange."""
        halved = self.layout.reduce == "bf16" or not self.assumed.fp32_gradients
        return 2 if halved else 4

    def between_steps(self) -> BetweenSteps:
        """Return the costs of all exchanges and of the optimizer."""
        shape, layout, efficiency, assumed = self.shape, self.layout, self.efficiency, self.assumed
        ranks = layout.copies
        stages = range(layout.pipeline) if shape.pattern else (0, layout.pipeline - 1)
        dense, experts = max(
            (parameters_of_stage(shape, layout, self._layers, stage) for stage in stages),
            key=sum,
        )
        shards = layout.shards
        # Copies of an expert are on every ``expert``-th rank only.
        expert_replicas = max(1, ranks // layout.expert)
        frozen, fixed = (0.0, 0.0), 0.0
        if shape.lora is not None:
            frozen = dense, experts
            fixed = dense / shards + experts / layout.expert_shards
            fixed *= shape.frozen_matrix_bytes or 2
            dense, experts = adapters_of_stage(shape, layout, self._layers)
        # Adam reads gradient, two moments and the copy in 32 bits, and writes the last three. A GPU
        # also writes the gradient and the parameter of 16 bits.
        on_gpu, on_host = (14, 14) if assumed.narrow_states else (34, 28)
        mine = dense / shards + experts / layout.expert_shards
        traffic = 0.0
        if layout.offload:
            # The host's processors update at the speed of its memory, which its GPUs share.
            each = HOST_MEMORY / self.cluster.gpus_per_host
            traffic, copies = self._copies_of_states(mine, each, fixed)
            optimizer = copies + mine * on_host / each
        else:
            optimizer = on_gpu * mine / (self.cluster.gpu.bandwidth * 1e9 * efficiency.stream)
        if ranks == 1:
            return BetweenSteps(0.0, 0.0, optimizer + traffic, 1.0, efficiency.exposed_data)

        # Experts are copied only on every ``expert``-th rank, further apart.
        for count, size, own, apart in (
            (dense, ranks, shards, layout.tensor),
            (experts, expert_replicas, layout.expert_shards, layout.tensor * layout.expert),
        ):
            if count and size > 1:
                traffic += self._traffic(count, size, own, apart)
        if layout.shards_parameters:
            width = shape.frozen_matrix_bytes or BYTES[assumed.precision]
            traffic += self._gathers(width * frozen[0], shards, layout.tensor)
            apart = layout.tensor * layout.expert
            traffic += self._gathers(width * frozen[1], layout.expert_shards, apart)
        if assumed.blocking or not assumed.overlaps_reduction:
            return BetweenSteps(0.0, traffic, optimizer, 1.0, efficiency.exposed_data)
        late, hiding = 0.0, 1.0
        if assumed.gathers_late and layout.shards_parameters and not keeps_stage(layout):
            late = self._gathers(self._parameter * dense, shards, layout.tensor) / 2
        if assumed.gathers_after and not layout.shards_parameters:
            near = Group(self.cluster, efficiency, shards, layout.tensor)
            late = near.all_gather(self._parameter * dense)
            if not reduces_each_micro_batch(layout):
                # Beside the backward pass of the last micro-batch.
                hiding = 2 / 3 / layout.grad_accumulation
        return BetweenSteps(traffic - late, late, optimizer, hiding, efficiency.exposed_data)

    def _copies_of_states(self, mine: float, host: float, fixed: float) -> tuple[float, float]:
        """Return the seconds in which offloaded states are copied over PCIe in a step, beside the
        computation and while a rank waits. ``mine``: the parameters of this rank's share; ``host``:
        bytes/s of the host's memory for one rank; ``fixed``: bytes of the share of a frozen model.

        In FSDP2 (``all_gather_inputs``, ``foreach_reduce``) every gather copies the share from the
        host, as it is stored, and every reduction returns its gradients. Those after the first one
        wait for the copy, and the host adds them up. Under HSDP, sums stay on the GPU until the
        last one.
        """
        layout = self.layout
        if self.assumed.habits.offloads != "all":
            return 0.0, mine * (self._gradient + 2) / PCIE
        stored = (2 if self.assumed.narrow_states else 4) * mine
        gathers = self._times_gathered
        adds = reduces_each_micro_batch(layout) and layout.sharding != "hybrid"
        added = layout.grad_accumulation - 1 if adds else 0
        beside = (stored * (gathers + 1) + fixed * gathers) / PCIE
        return beside, added * stored * (1 / PAGEABLE + 3 / host)

    @property
    def _times_gathered(self) -> int:
        """How often a rank gathers each parameter in a step."""
        layout = self.layout
        if keeps_stage(layout) or not layout.shards_parameters:
            return 1
        return 2 * layout.grad_accumulation

    def _gathers(self, size: float, shards: int, apart: int) -> float:
        """Seconds to gather ``size`` bytes of parameters from ``shards`` ranks for the forward and
        backward passes of a step."""
        pieces = self._layers + 1
        group = Group(self.cluster, self.efficiency, shards, apart)
        return self._times_gathered * pieces * group.all_gather(size / pieces)

    def _traffic(self, count: float, ranks: int, shards: int, apart: int) -> float:
        """Seconds for data ranks to exchange ``count`` parameters and their gradients in a step.
        ``shards``: how many of the ``ranks`` share one copy of the sharded states."""
        layout, efficiency, gradient = self.layout, self.efficiency, self._gradient
        group = Group(self.cluster, efficiency, ranks, apart)
        near = Group(self.cluster, efficiency, shards, apart)
        parameter = self._parameter
        if layout.shards_parameters:
            one = count / (self._layers + 1)
            gathers = (self._layers + 1) * 2 * near.all_gather(parameter * one)
            scatters = (self._layers + 1) * near.all_gather(gradient * one)
            if shards < ranks:
                far = Group(self.cluster, efficiency, ranks // shards, apart * shards)
                scatters += far.all_reduce(gradient * count / shards)
            if keeps_stage(layout):
                return gathers / 2 + scatters
            # Every micro-batch gathers; a layer's gather overlaps with another's computation.
            return layout.grad_accumulation * (gathers + scatters)
        if shards < ranks or self.assumed.reduces_to_all:
            # Reduce over all ranks, update in shards, and gather from the ranks with shards.
            return group.all_reduce(gradient * count) + near.all_gather(parameter * count)
        scatters = layout.grad_accumulation if reduces_each_micro_batch(layout) else 1
        return scatters * group.all_gather(gradient * count) + group.all_gather(parameter * count)


@lru_cache(maxsize=1 << 14)
def between_steps(ranks: DataRanks) -> BetweenSteps:
    """Return `DataRanks.between_steps`, computed once for equal ``ranks``."""
    return ranks.between_steps()

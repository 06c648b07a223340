"""A layout with its costs."""

from __future__ import annotations

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import can_offload
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cost.host_memory import HostMemory, host_memory
from dtrain.parallelism.cost.memory import (
    Memory,
    lasting_states,
    least_activations,
    least_memory,
    memory,
)
from dtrain.parallelism.cost.speed import Speed, speed
from dtrain.parallelism.cost.step_time import (
    StepTime,
    even_time,
    least_time,
    step_time,
    time_with_data,
)
from dtrain.parallelism.model.shape import Shape
from dtrain.records import cached_property, changed, dataclass
from dtrain.runtime.layout import Layout

HEADROOM = 0.04
"""Share of a GPU's memory that a layout must leave free, because estimates have errors."""

HOST_HEADROOM = 0.1
"""Share of a host's memory for its system, and for what processes need beside the states: CUDA,
libraries, data. An assumption."""

CLOSE = 0.07
"""Share by which the estimates for two layouts must differ to rank them: the errors of two layouts
of one model on the same GPUs differ by this in published sweeps on A100s (mean over nine tables of
the median)."""


EXPERTS = 1.3
"""Factor of the upper end of the interval with experts: the software of their exchange changes
fast, and one release of a library took 1.5 times as long as another. 80 % of 539 published step
times end at 1.7 times the estimate, with equal weight for each of 42 publishers. Layers with parts
have the same factor: 32 published runs that have any took 0.90 to 1.52 times the estimate (Nemotron
3, DeepSeek-V4 and Qwen3-Next)."""

ROOMY = 0.93
"""Maximum share of a GPU's memory in a layout that leaves room for the estimate's error. Of
published runs whose estimate is 85 to 93 % of the memory, 9 of 319 ran out of it."""

RAN_OUT = 2, 82
"""How many published runs ran out of memory, of those whose estimate is `ROOMY` to 96 % of it: a
plan has no fuller layout."""

MEMORY_INTERVAL = 0.85, 1.30
"""Measured peaks of memory as multiples of the estimate: 80 % of the published peaks are between
0.87 and 1.25, with equal weight for each publisher (``scripts/validate_planner.py`` with all
runs)."""


@dataclass(frozen=True)
class Candidate:
    """A layout for a model on a cluster. Costs are computed on first use."""

    shape: Shape
    layout: Layout
    cluster: GpuCluster
    efficiency: Efficiency
    assumed: Assumptions
    slowdown: float = 1.0
    """Factor of the estimated time, from a trial of the layout."""

    @cached_property
    def memory(self) -> Memory:
        return memory(self.shape, self.layout, self.assumed)

    @cached_property
    def least_memory(self) -> float:
        """GiB of one pipeline stage: a lower limit of the memory, and cheaper to compute."""
        return least_memory(self.shape, self.layout, self.assumed)

    @cached_property
    def least_activations(self) -> float:
        """A lower limit of `least_kept`, with or without offload."""
        return least_activations(self.shape, self.layout, self.assumed)

    @cached_property
    def least_kept(self) -> float:
        """A lower limit of `least_memory`, and much cheaper to compute."""
        return self.least_activations + lasting_states(self.shape, self.layout, self.assumed)

    @property
    def may_offload(self) -> bool:
        """Whether the states can be in a memory other than the device's."""
        return self.cluster.gpu.has_host and can_offload(self.layout)

    @cached_property
    def offloaded(self) -> Candidate:
        """This layout with its optimizer in the hosts' memory."""
        layout = changed(self.layout, offload=True)
        others = self.cluster, self.efficiency, self.assumed, self.slowdown
        return Candidate(self.shape, layout, *others)

    @property
    def hosted(self) -> HostMemory:
        """GiB of a host's memory for the states of its GPUs, if the layout offloads."""
        gpus = min(self.cluster.gpus_per_host, self.cluster.gpus)
        pinned, pageable = host_memory(self.shape, self.layout, self.assumed)
        return HostMemory(gpus * pinned, gpus * pageable)

    @property
    def host_limit(self) -> float:
        """GiB of the usual host of these GPUs that the layout may use."""
        return self.cluster.host_memory * (1 - HOST_HEADROOM)

    @property
    def fits_host(self) -> bool:
        """Whether the usual host can hold what the layout offloads."""
        return self.hosted.total <= self.host_limit

    @cached_property
    def time(self) -> StepTime:
        found = step_time(self.shape, self.layout, self.cluster, self.efficiency, self.assumed)
        return found if self.slowdown == 1 else found.times(self.slowdown)

    @cached_property
    def least_time(self) -> float:
        """A lower limit of the seconds of a step, which is cheaper to compute."""
        return least_time(self.shape, self.layout, self.cluster, self.efficiency, self.assumed)

    @property
    def time_with_data(self) -> float:
        """A lower limit of the seconds of a step, at least `even_time`, which takes longer."""
        others = self.cluster, self.efficiency, self.assumed
        return time_with_data(self.shape, self.layout, *others)

    @cached_property
    def even_time(self) -> float:
        """A lower limit of `least_time`, and much cheaper to compute."""
        return even_time(self.shape, self.layout, self.cluster, self.efficiency, self.assumed)

    @cached_property
    def speed(self) -> Speed:
        return speed(self.shape, self.layout, self.cluster, self.assumed, self.time.total)

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which a step takes with a probability of 80 %."""
        seconds, efficiency = self.time.total, self.efficiency
        unsure = self.shape.experts or self.shape.every_part
        slowest = efficiency.interval_high * (EXPERTS if unsure else 1.0)
        return seconds * efficiency.interval_low, seconds * slowest

    @property
    def memory_interval(self) -> tuple[float, float]:
        """GiB between which the fullest GPU needs with a probability of 80 %."""
        low, high = MEMORY_INTERVAL
        return self.memory.total * low, self.memory.total * high

    @property
    def limit(self) -> float:
        """GiB of one GPU that the layout may use."""
        return self.cluster.gpu.memory * (1 - HEADROOM)

    @property
    def has_room(self) -> bool:
        """Whether the layout leaves room for the error of the estimate."""
        return self.memory.total <= ROOMY * self.cluster.gpu.memory

    @property
    def may_fit(self) -> bool:
        """Whether `least_memory` is within the limit: faster than `fits`."""
        return self.least_kept <= self.limit and self.least_memory <= self.limit

    @property
    def fits(self) -> bool:
        return self.may_fit and self.memory.total <= self.limit

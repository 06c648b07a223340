"""Costs that depend on a few fields of a layout: computed once for all layouts with these."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.model.shape import Shape
from dtrain.records import cached_property, dataclass
from dtrain.runtime.layout import Layout


@dataclass(frozen=True, eq=False)
class KeyedCosts:
    """Base of classes that compute a part of a step's costs. The objects are keys of caches: two
    are equal if their layouts have the same `layout_fields`, and all else is equal."""

    efficiency: Efficiency
    cluster: GpuCluster
    shape: Shape
    layout: Layout
    assumed: Assumptions

    layout_fields: ClassVar[attrgetter[Any]]
    """Returns the fields of a layout that the part depends on."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        own = self.efficiency, self.cluster, self.shape, self.assumed
        return (*own, *self.layout_fields(self.layout))

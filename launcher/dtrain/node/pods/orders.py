"""The orders of the launcher to the watcher of a pod: lines of JSON. The first is a `WatchPod`, and
then any `PodOrder` may follow, distinguished by ``op``. `dtrain.messages.pods` has the answers.

Not shipped: the launcher imports it, and the type checks of the modules that run on nodes.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from dtrain.node.agent.commands import Ping, Stacks


class WatchPod(TypedDict):
    folder: str
    """Of the attempt."""
    world_size: int
    offsets: dict[str, int]
    """Where the reports in each progress file go on."""
    attached: bool
    """Whether other files begin with their last report."""


class KillWorkers(TypedDict):
    """Kill the processes that the pod's script has started: it then reports that they failed."""

    op: Literal["kill"]


PodOrder = Stacks | KillWorkers | Ping

"""Collective operations between training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from dtrain.runtime.progress import steps
from dtrain.runtime.stopping import stop_requested
from dtrain.runtime.tensorflow.run import StrategyRun

_SUM = tf.distribute.ReduceOp.SUM


def stop_together(run: StrategyRun) -> Callable[[], bool]:
    """Return a function that returns whether to stop after this step, the same on every worker.

    All workers must call it at the same steps. SIGTERM reaches them at different steps, and a
    worker that continues would wait forever for the workers that stopped.
    """
    if not run.several_workers:
        return stop_requested

    @tf.function  # type: ignore[untyped-decorator]
    def votes(mine: tf.Tensor) -> tf.Tensor:
        def replica(vote: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(_SUM, tf.identity(vote))

        return run.strategy.run(replica, (mine,))

    def stop() -> bool:
        with steps.waiting():
            total = votes(tf.constant(float(stop_requested())))
            return float(run.strategy.experimental_local_results(total)[0]) > 0

    return stop


def meet(run: StrategyRun) -> None:
    """Wait for all workers at the end of a script. If one leaves while the chief still evaluates,
    for example, the chief sees a crash."""
    if run.several_workers:
        stop_together(run)()


def take_from_chief(run: StrategyRun, variables: Iterable[Any]) -> None:
    """Give ``variables`` the chief's values in every process. Needs no shared file system."""
    if not run.several_workers:
        return
    values = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in variables]

    @tf.function  # type: ignore[untyped-decorator]
    def broadcast() -> Any:
        def replica() -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            first = tf.equal(context.replica_id_in_sync_group, 0)
            # A sum with zeros is exact, and every collective backend supports it.
            return [
                context.all_reduce(_SUM, tf.where(first, value, tf.zeros_like(value)))
                for value in values
            ]

        return run.strategy.run(replica)

    for variable, value in zip(values, broadcast(), strict=True):
        variable.assign(run.strategy.experimental_local_results(value)[0])

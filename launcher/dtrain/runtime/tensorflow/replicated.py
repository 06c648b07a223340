"""Runs one training step on every replica, for custom loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.runtime.tensorflow.run import StrategyRun
from dtrain.runtime.tensorflow.timing import measurable, timer

_SUM = tf.distribute.ReduceOp.SUM


def replicated(run: StrategyRun, step: Callable[..., tf.Tensor]) -> Callable[[Any], tf.Tensor]:
    """A graph function for one distributed batch: runs ``step(*batch)`` on every replica and sums
    the results, such as each replica's share of the mean loss."""

    @tf.function  # type: ignore[untyped-decorator]
    def run_step(batch: Any) -> tf.Tensor:
        if _by_hand(run):
            # Each worker is one replica, but the strategy still wraps its part of the batch.
            mine = (run.strategy.experimental_local_results(part)[0] for part in batch)
            return _sum_over_workers(run, [step(*mine)])[0]
        return run.strategy.reduce(_SUM, run.strategy.run(step, batch), axis=None)

    def measured(batch: Any) -> tf.Tensor:
        timer.begin_step()
        result = run_step(batch)
        timer.end_step()
        return result

    return measured if measurable(run) else run_step


def sum_gradients(run: StrategyRun, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Gradients ready for ``optimizer.apply_gradients``.

    An optimizer itself sums the replicas' gradients for variables that the strategy created. It
    does not know the layers placed by hand, so their gradients are summed over the workers here.
    The time at which each worker has its gradients shows which one is slow.
    """
    if measurable(run):
        timer.has_gradients(gradients)
    return _sum_over_workers(run, gradients) if _by_hand(run) else gradients


def _by_hand(run: StrategyRun) -> bool:
    return run.name == "model_parallel" and run.several_workers


def _sum_over_workers(run: StrategyRun, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    def replica(*mine: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(_SUM, [tf.identity(tensor) for tensor in mine])

    return list(run.strategy.run(replica, tuple(tensors)))

"""Run one training step on every replica, in loops that call no ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.runtime.tensorflow.run import Run

_SUM = tf.distribute.ReduceOp.SUM


def replicated(run: Run, step: Callable[..., tf.Tensor]) -> Callable[[Any], tf.Tensor]:
    """A graph function of one distributed batch: ``step(*batch)`` on every replica, and the sum
    of what the replicas return (their shares of the mean loss, say)."""

    @tf.function  # type: ignore[untyped-decorator]
    def run_step(batch: Any) -> tf.Tensor:
        if _by_hand(run):
            # Each worker is one replica, whose part of the batch the strategy still wraps up.
            mine = (run.strategy.experimental_local_results(part)[0] for part in batch)
            return _sum_over_workers(run, [step(*mine)])[0]
        return run.strategy.reduce(_SUM, run.strategy.run(step, batch), axis=None)

    return run_step  # type: ignore[no-any-return]


def sum_gradients(run: Run, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Gradients ready for ``optimizer.apply_gradients``.

    An optimizer sums the replicas' gradients itself, for variables that the strategy made. Those
    of layers placed by hand it does not know, so their sum over the workers is taken here.
    """
    return _sum_over_workers(run, gradients) if _by_hand(run) else gradients


def _by_hand(run: Run) -> bool:
    return run.name == "model_parallel" and run.several_workers


def _sum_over_workers(run: Run, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    def replica(*mine: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(_SUM, [tf.identity(tensor) for tensor in mine])

    return list(run.strategy.run(replica, tuple(tensors)))

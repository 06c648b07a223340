"""Asynchronous training: the chief schedules steps, and free workers run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.runtime.tensorflow.run import StrategyRun

_SUM = tf.distribute.ReduceOp.SUM


class Coordinator:
    """Runs ``step(*batch)``, which returns a loss, on any free worker.

    ``make_dataset`` is called on each worker and creates its batches. A worker with several GPUs
    divides each batch among them: like `replicated`, it runs ``step`` on every part and sums the
    losses, which must therefore be shares of the batch's mean. A worker that dies is skipped until
    it returns, and its step is repeated. If a parameter server dies, its variables are lost.
    """

    def __init__(
        self,
        run: StrategyRun,
        make_dataset: Callable[[], tf.data.Dataset],
        step: Callable[..., tf.Tensor],
    ) -> None:
        strategy = run.strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._batches = iter(self._coordinator.create_per_worker_dataset(make_dataset))

        def replica(*batch: Any) -> tf.Tensor:
            return step(*_part(batch, run.replicas))

        self._step = tf.function(
            lambda batches: strategy.reduce(_SUM, strategy.run(replica, next(batches)), axis=None)
        )

    def run(self, steps: int) -> list[float]:
        """Run ``steps`` steps and return their losses.

        Raises RuntimeError if a parameter server is lost: restart all tasks and restore.
        """
        try:
            losses = [
                self._coordinator.schedule(self._step, args=(self._batches,)) for _ in range(steps)
            ]
            self._coordinator.join()
            return [float(loss.fetch()) for loss in losses]
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise RuntimeError(
                f"a parameter server and its variables are lost ({error.message}): restart the"
                " job from its checkpoint"
            ) from None


def _part(batch: Any, replicas: int) -> Any:
    """This replica's samples: `strategy.run` passes every GPU the whole plain batch."""
    if replicas == 1:
        return batch
    mine = tf.distribute.get_replica_context().replica_id_in_sync_group
    with tf.device("/device:CPU:0"):
        return tf.nest.map_structure(lambda samples: samples[mine::replicas], batch)

"""Asynchronous training: the chief hands out steps, workers take them as they come free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.runtime.tensorflow.run import Run

_SUM = tf.distribute.ReduceOp.SUM


class Coordinator:
    """Runs ``step(*batch)``, which returns a loss, on whichever worker is free.

    ``make_dataset`` is called on each worker and makes its batches. A worker with several GPUs
    divides each batch among them: like `replicated`, it runs ``step`` on every part and sums the
    losses, which therefore are shares of the batch's mean. A worker that dies is left out until
    it is back, and its step is done again; with a parameter server variables are lost.
    """

    def __init__(
        self,
        run: Run,
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
        """Have ``steps`` steps done and return their losses.

        Raises RuntimeError when a parameter server is lost: start all tasks again and restore.
        """
        try:
            losses = [
                self._coordinator.schedule(self._step, args=(self._batches,)) for _ in range(steps)
            ]
            self._coordinator.join()
            return [float(loss.fetch()) for loss in losses]
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise RuntimeError(
                f"a parameter server is lost, and variables with it ({error.message}): start the"
                " job again, from its checkpoint"
            ) from None


def _part(batch: Any, replicas: int) -> Any:
    """This replica's samples, for `strategy.run` hands a plain batch to every GPU whole."""
    if replicas == 1:
        return batch
    mine = tf.distribute.get_replica_context().replica_id_in_sync_group
    with tf.device("/device:CPU:0"):
        return tf.nest.map_structure(lambda samples: samples[mine::replicas], batch)

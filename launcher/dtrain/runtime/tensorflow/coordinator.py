"""Asynchronous training: the chief hands out steps, workers take them as they come free."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from dtrain.runtime.tensorflow.run import Run


class Coordinator:
    """Runs ``step(*batch)``, which returns a loss, on whichever worker is free.

    ``make_dataset`` is called on each worker and makes its batches. A worker that dies is left
    out until it is back, and its step is done again; with a parameter server variables are lost.
    """

    def __init__(
        self,
        run: Run,
        make_dataset: Callable[[], tf.data.Dataset],
        step: Callable[..., tf.Tensor],
    ) -> None:
        self._strategy = run.strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(run.strategy)
        self._batches = iter(self._coordinator.create_per_worker_dataset(make_dataset))
        self._step = tf.function(lambda batches: run.strategy.run(step, next(batches)))

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

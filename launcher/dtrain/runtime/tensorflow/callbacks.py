"""Keras callbacks that report progress, save checkpoints and stop on SIGTERM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain.runtime.progress import progress
from dtrain.runtime.tensorflow.checkpoints import Checkpoints
from dtrain.runtime.tensorflow.collectives import stop_together
from dtrain.runtime.tensorflow.legacy_keras import keras
from dtrain.runtime.tensorflow.run import StrategyRun
from dtrain.runtime.tensorflow.timing import measurable, measure_fit, timer


def callbacks(
    run: StrategyRun,
    *,
    total: int | None = None,
    done: int = 0,
    checkpoints: Checkpoints | None = None,
    save_every: int = 100,
    logdir: str | Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[Any]:
    """Callbacks for ``fit``: progress of ``total`` steps, checkpoints, a clean end on SIGTERM,
    and TensorBoard events from the chief.

    ``done`` is the number of steps that an earlier run has done. ``on_step`` is called with each
    step and its loss; ``fit`` then reports the loss of an epoch's last step, not the mean. Under
    parameter servers, Keras calls back only after epochs, so saving and stopping wait for the end
    of an epoch (`epochs`). The same callbacks can serve several calls of ``fit``.
    """
    kind = _AfterEpoch if run.asynchronous else _AfterStep
    after: list[Any] = [kind(run, total, done, checkpoints, save_every, on_step)]
    if logdir is not None and run.is_chief:
        after.append(keras().callbacks.TensorBoard(str(logdir)))
    return after


def epochs(run: StrategyRun, steps: int, every: int) -> list[tuple[int, int, int]]:
    """``initial_epoch``, ``epochs`` and ``steps_per_epoch`` of the calls of ``fit`` that together
    take ``steps`` steps. Under parameter servers, epochs have ``every`` steps and the last epoch
    has the rest; other strategies use one epoch."""
    if not run.asynchronous:
        return [(0, 1, steps)]
    whole, rest = divmod(steps, every)
    calls = [(0, whole, every), (whole, whole + 1, rest)]
    return [(first, last, length) for first, last, length in calls if first < last and length]


class _Training(keras().callbacks.Callback):  # type: ignore[misc]
    """Counts optimizer steps, and uses the count to report, save and stop."""

    def __init__(
        self,
        run: StrategyRun,
        total: int | None,
        done: int,
        checkpoints: Checkpoints | None,
        save_every: int,
        on_step: Callable[[int, float], None] | None,
    ) -> None:
        super().__init__()
        self._run = run
        self._total = total
        self._done = self._saved = done
        self._checkpoints = checkpoints
        self._save_every = save_every
        self._on_step = on_step
        self._must_stop = stop_together(run)
        self._measures = measurable(run)

    def _advance(self, steps: int, loss: float) -> None:
        self._done += steps
        if self._run.is_chief:
            progress(self._done, total=self._total, loss=loss)
        if self._on_step:
            self._on_step(self._done, loss)
        stop = self._must_stop()
        if stop or self._done - self._saved >= self._save_every:
            self._save()
        if stop:
            self.model.stop_training = True

    def on_train_begin(self, logs: Any = None) -> None:
        # tf-keras sums over the workers, but each worker already has the mean.
        if self._run.several_workers and self.model.distribute_reduction_method == "auto":
            self.model.distribute_reduction_method = "first"
        if self._measures:
            measure_fit(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        if self._done != self._saved:
            self._save()

    def _save(self) -> None:
        if self._checkpoints:
            self._checkpoints.save(self._done)
        self._saved = self._done


class _AfterStep(_Training):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Keras passes the mean since the epoch began, which hides the loss of a late step.
        for metric in self.model.metrics:
            if metric.name == "loss":
                metric.reset_state()
        self._first = batch
        timer.begin_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        count = batch - self._first + 1  # more than one with `steps_per_execution`
        if self._measures:
            timer.end_step(count)
        self._advance(count, float(logs["loss"]))


class _AfterEpoch(_Training):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._advance(self.params["steps"], float(logs["loss"]))

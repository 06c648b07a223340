"""Checkpoints of distributed training. Only the chief's are kept."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from dtrain.runtime.progress import phase
from dtrain.runtime.stopping import stop_requested
from dtrain.runtime.tensorflow.collectives import take_from_chief
from dtrain.runtime.tensorflow.run import StrategyRun


class Checkpoints:
    """The newest ``keep`` checkpoints of ``objects`` in ``folder``, each named by its step.

        saved = Checkpoints(folder, run, model=model, optimizer=optimizer)
        step = saved.restore()
        ...
        saved.save(step)

    Models and optimizers must be built. Only the chief needs the folder: it sends what it reads to
    the other workers. An evaluator must be able to read the chief's folder.
    """

    def __init__(
        self, folder: str | Path, run: StrategyRun, *, keep: int = 3, **objects: Any
    ) -> None:
        self._folder = Path(folder)
        self._run = run
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self._objects = objects
        self._checkpoint = tf.train.Checkpoint(step=self._step, **objects)
        # Every worker creates it here: inside a strategy's scope, creating a variable is
        # collective.
        _ = self._checkpoint.save_counter
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(self._folder), max_to_keep=keep, step_counter=self._step
        )
        # By default each parameter server reads and writes its variables on its own disk.
        chief = "/job:chief/replica:0/task:0/device:CPU:0" if run.asynchronous else None
        self._options = tf.train.CheckpointOptions(experimental_io_device=chief)

    @phase("load")
    def restore(self) -> int:
        """Load the newest checkpoint that can be read and return its step; 0 if there is none.

        If checkpoints exist, but none can be read, raises the error of the newest: ValueError if it
        lacks a variable of these objects.
        """
        if self._run.is_chief:
            self._load_newest()
        variables = [v for owner in self._objects.values() for v in owner.variables]
        take_from_chief(self._run, [self._step, *variables])
        return int(self._step.numpy())

    @phase("save")
    def save(self, step: int) -> None:
        """Save everything as step ``step``. All workers must call it at the same step, because some
        variables are assembled from all of them."""
        self._step.assign(step)
        if self._run.is_chief:
            self._manager.save(checkpoint_number=step, options=self._options)
        elif self._run.several_workers:
            with tempfile.TemporaryDirectory(prefix="dtrain-") as unwanted:
                self._checkpoint.write(str(Path(unwanted) / "checkpoint"))

    def follow(self) -> Iterator[int]:
        """For an evaluator: load each new checkpoint when it appears, until SIGTERM."""
        for path in tf.train.checkpoints_iterator(
            str(self._folder), timeout=2, timeout_fn=stop_requested
        ):
            self._load(path)
            yield int(self._step.numpy())

    def _load_newest(self) -> None:
        # Not `latest_checkpoint`, which finds none at all if the newest lacks a file.
        newest: Exception | None = None
        for path in reversed(self._manager.checkpoints):
            try:
                self._load(path)
            except Exception as error:  # noqa: BLE001 - raised if all fail
                newest = newest or error
                sys.stderr.write(f"warning: {path} cannot be read: {str(error).splitlines()[0]}\n")
            else:
                return
        if newest is not None:
            raise newest

    def _load(self, path: str) -> None:
        try:
            status = self._checkpoint.read(path, self._options)
            status.assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                f"{path} is a checkpoint of other objects ({str(error).splitlines()[0]}): use a"
                " separate folder for each model and optimizer"
            ) from None

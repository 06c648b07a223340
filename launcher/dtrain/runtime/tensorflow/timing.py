"""Measures how long this process computes in a step before it waits for the others.

The workers of a mirrored strategy wait for each other inside the graph, in the sum of the
gradients. So the graph itself says when a process has its own gradients: an operation that depends
on all of them, and on nothing of other processes, notes the time. Nothing depends on it, so it
delays no sum. On a GPU, it also needs one element of the first gradients, which the backward pass
computes last. The step ends once the sums have arrived. The update of the variables counts as a
part of the wait.

Under parameter servers, no worker waits for another. On a TPU, and in a function with
``jit_compile``, the graph cannot call back. With ``steps_per_execution`` above 1, nobody knows when
each step began. There, only the number of steps is known.

The GPU path has never run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from dtrain.runtime.progress import steps
from dtrain.runtime.tensorflow.run import StrategyRun

FIRST = 2
"""Number of gradients, the first ones, of which the operation needs an element."""


class GraphTimer:
    """Measures the steps of this process."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._data = 0.0
        self._ready: float | None = None
        """When the last replica of this process had its gradients."""

    def begin_step(self) -> None:
        """The step's function is called. If it fetches its batch itself, `has_data` follows."""
        self._begun, self._data, self._ready = time.monotonic(), 0.0, None

    def end_step(self, count: int = 1) -> None:
        """The step's function has returned, after ``count`` steps."""
        if count == 1 and self._data > self._begun:
            steps.add_wait(self._data - self._begun, "data")
        if self._ready is not None:
            steps.end_wait(self._ready)
        step = steps.end_step(count)
        if count == 1:
            known = self._ready is not None and step.whole is not None
            own = max(0.0, (step.whole or 0.0) - step.data - step.waited)
            steps.add(step, own if known else None)

    def has_data(self, batch: Any) -> None:
        """In a graph: ``batch`` has arrived."""

        def note() -> None:
            self._data = time.monotonic()

        _when(_tensors(batch), note)

    def has_gradients(self, gradients: Iterable[Any]) -> None:
        """In a graph: this replica has computed its ``gradients``."""

        def note(*_elements: Any) -> None:
            if self._ready is None:
                steps.begin_wait()
            self._ready = time.monotonic()

        known = _tensors([*gradients])
        first = [one for one in known if one.dtype.is_floating][:FIRST]
        _when(known, note, [tf.cast(tf.reshape(one, [-1])[:1], tf.float32) for one in first])


timer = GraphTimer()
"""The steps of this process."""


def measurable(run: StrategyRun) -> bool:
    """Whether the workers of ``run`` wait for each other, and their graph can call back."""
    return run.several_workers and not isinstance(run.strategy, tf.distribute.TPUStrategy)


def measure_fit(model: Any) -> None:
    """Measure the steps that ``fit`` of a tf-keras model does. It must not have been called yet."""
    optimizer = model.optimizer
    several = getattr(model, "_steps_per_execution", None)
    if several is not None and int(tf.convert_to_tensor(several)) > 1:
        return
    # A model may have several optimizers.
    if getattr(optimizer, "_dtrain_measured", not hasattr(optimizer, "apply_gradients")):
        return
    train_step, apply_gradients = model.train_step, optimizer.apply_gradients

    def measured_step(data: Any) -> Any:
        timer.has_data(data)
        return train_step(data)

    def measured_apply(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = list(gradients)
        timer.has_gradients(gradient for gradient, _ in gradients)
        return apply_gradients(gradients, *args, **kwargs)

    model.train_step, optimizer.apply_gradients = measured_step, measured_apply
    optimizer._dtrain_measured = True


def _tensors(values: Any) -> list[tf.Tensor]:
    """All tensors in ``values``, also those of sparse and ragged ones."""
    return [one for one in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(one)]


def _when(needed: list[tf.Tensor], note: Any, elements: Iterable[tf.Tensor] = ()) -> None:
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return
    with tf.device("/device:CPU:0"), tf.control_dependencies(needed):
        tf.numpy_function(note, [*elements], [])

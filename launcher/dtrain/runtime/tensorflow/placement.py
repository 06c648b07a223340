"""Manual model parallelism: consecutive layers on different devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import tensorflow as tf

from dtrain.runtime.tensorflow.collectives import take_from_chief
from dtrain.runtime.tensorflow.legacy_keras import keras
from dtrain.runtime.tensorflow.run import StrategyRun
from dtrain.runtime.tensorflow.strategies import local_devices


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """The part for each of ``sizes``, in order, with the largest part as small as possible.

    Each part is consecutive. If there are fewer sizes than parts, some parts stay empty.
    """
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if _fill(sizes, limit)[-1] < parts:
            high = limit
        else:
            low = limit + 1
    return _fill(sizes, low) if sizes else []


def _fill(sizes: Sequence[int], limit: int) -> list[int]:
    """Fill parts in order, none above ``limit``."""
    part, used, parts = 0, 0, []
    for size in sizes:
        if used + size > limit:
            part, used = part + 1, 0
        used += size
        parts.append(part)
    return parts


def placed(
    layers: Sequence[Any],
    input_shape: Sequence[int],
    run: StrategyRun,
    devices: Sequence[str] | None = None,
) -> Any:
    """``layers`` as a sequential Keras model over ``devices``, balanced by their parameters.

    ``input_shape`` is the shape of one sample. The default for ``devices`` is all GPUs of this
    process, or its logical CPUs. With several workers, each gets a whole model with the chief's
    values.

    Raises RuntimeError inside ``strategy.scope()``, which would move all variables to one device.
    """
    if tf.distribute.has_strategy():
        raise RuntimeError("placed() must be called outside strategy.scope()")
    devices = list(devices or local_devices(run.cluster))
    parts = balanced(_parameters(layers, input_shape), len(devices))
    stages = [OnDevice(layer, devices[part]) for layer, part in zip(layers, parts, strict=True)]
    model = keras().Sequential(stages)
    model.build((None, *input_shape))
    take_from_chief(run, model.variables)
    return model


def _parameters(layers: Sequence[Any], input_shape: Sequence[int]) -> list[int]:
    """Parameters of each layer, counted on temporary copies."""
    counts, shape = [], (None, *input_shape)
    for layer in layers:
        copy = type(layer).from_config(layer.get_config())
        with tf.device("/device:CPU:0"):
            copy.build(shape)
        shape = tuple(copy.compute_output_shape(shape))
        counts.append(sum(prod(weight.shape) for weight in copy.weights))
    return counts


class OnDevice(keras().layers.Wrapper):  # type: ignore[misc]
    """A layer whose variables, forward pass and backward pass are on ``device``."""

    def __init__(self, layer: Any, device: str, **options: Any) -> None:
        super().__init__(layer, **options)
        self.device = device

    def build(self, input_shape: Any = None) -> None:
        with tf.device(self.device):
            super().build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        takes_training = "training" in self.layer.call.__code__.co_varnames
        options = {"training": training} if takes_training else {}

        # tf.device affects only operations created inside it. Those of the backward pass are
        # created later, and without this they would all run on the first device.
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def stage(inputs: tf.Tensor) -> Any:
            with tf.device(self.device), tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = self.layer(inputs, **options)

            def backward(upstream: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
                with tf.device(self.device):
                    found = tape.gradient(outputs, [inputs, *variables], upstream)
                return found[0], found[1:]

            return outputs, backward

        return stage(inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return self.layer.compute_output_shape(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "device": self.device}

"""Whatever a model takes and computes, measuring its steps neither fails nor changes weights."""

from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.runtime import tensorflow as distributed
from dtrain.runtime.tensorflow import timing

keras = distributed.keras()
computed: list[Any] = []
timing.steps.add = lambda step, compute: computed.append(compute)
STEPS = 4


class Model(keras.Model):
    """Has a sparse gradient, one in 16 bits, and weights without one."""

    def __init__(self, *, own_optimizer: bool) -> None:
        super().__init__()
        self.rows = self.add_weight("rows", (5, 3), initializer="ones")
        self.narrow = self.add_weight("narrow", (3,), tf.bfloat16, "ones")
        self.unused = self.add_weight("unused", (2,), initializer="ones")
        self.own_optimizer = own_optimizer

    def train_step(self, data: Any) -> Any:
        words, (target, _) = data
        with tf.GradientTape() as tape:
            taken = tf.nn.embedding_lookup(self.rows, words.to_tensor())
            narrow = tf.reduce_sum(tf.cast(taken, tf.bfloat16) * self.narrow)
            loss = (tf.cast(narrow, tf.float32) - tf.reduce_sum(target)) ** 2 / 1e3
        gradients = tape.gradient(loss, self.trainable_variables)
        optimizer = self.optimizer[0] if self.own_optimizer else self.optimizer
        optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Watch(keras.callbacks.Callback):
    def __init__(self, *, measured: bool) -> None:
        super().__init__()
        self.measured = measured

    def on_train_begin(self, logs: Any = None) -> None:
        if self.measured:
            timing.measure_fit(self.model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        timing.timer.begin_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        timing.timer.end_step()


def trained(*, measured: bool, own_optimizer: bool = False, eager: bool = False) -> list[Any]:
    """The weights after training. `computed` has what was measured."""
    computed.clear()
    words = tf.ragged.constant([[1, 2], [3]], dtype=tf.int32)
    data = tf.data.Dataset.from_tensors((words, (tf.ones(2), None))).repeat()
    model = Model(own_optimizer=own_optimizer)
    sgd = [keras.optimizers.legacy.SGD(1e-2) for _ in range(2)]
    model.compile(sgd if own_optimizer else sgd[0], run_eagerly=eager)
    watch = Watch(measured=measured)
    model.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=[watch], shuffle=False)
    return model.get_weights()


def inside_xla() -> None:
    """A function that XLA compiles may be part of another graph."""

    @tf.function(jit_compile=True)
    def compiled(x: tf.Tensor) -> tf.Tensor:
        timing.timer.has_gradients([x])
        return x * 2

    assert float(tf.function(lambda x: compiled(x) + 1)(tf.constant(1.0))) == 3


for options in ({}, {"eager": True}, {"own_optimizer": True}):
    plain, measured = trained(measured=False, **options), trained(measured=True, **options)
    for before, after in zip(plain, measured, strict=True):
        assert np.array_equal(before, after), options
    known = [one is not None for one in computed[1:]]  # nobody knows when the first step began
    assert known == [not options.get("own_optimizer")] * (STEPS - 1), options
inside_xla()
print("all measured")

"""Two workers, the second of which is slow in its layers.

slow_worker.py (fit|custom) STEPS SECONDS SLOWER
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.runtime import tensorflow as distributed

keras = distributed.keras()
loop, steps, seconds, slower = sys.argv[1], *map(float, sys.argv[2:])
distributed.configure_devices(seed=0)
run = distributed.init()
pause = seconds * (slower if run.cluster.index == 1 else 1.0)


class Slow(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(lambda: time.sleep(pause), [], [])]):
            return tf.identity(inputs)


rows = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
data = distributed.dataset((rows, rows), run, 8)
with run.strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8), Slow(), keras.layers.Dense(8)])
    model.build((None, 8))
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(model.trainable_variables)
if loop == "fit":
    model.compile(optimizer, "mse")
    watch = distributed.callbacks(run)
    model.fit(data, steps_per_epoch=int(steps), verbose=0, callbacks=watch)
else:

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2) / run.replicas
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = distributed.sum_gradients(run, gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    take = distributed.replicated(run, step)
    batches = iter(run.strategy.experimental_distribute_dataset(data))
    for _ in range(int(steps)):
        float(take(next(batches)))
distributed.meet(run)

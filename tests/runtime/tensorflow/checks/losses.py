"""fit reports a step's own loss, even after a much larger one, and counts all steps."""

import numpy as np
import tensorflow as tf

from dtrain.runtime import tensorflow as distributed

keras = distributed.keras()
run = distributed.init()
model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
model.build((None, 1))
model.compile(keras.optimizers.SGD(0.0), "mse")
values = np.array([[1e5], [1.0], [2.0], [3.0]], np.float32)
data = tf.data.Dataset.from_tensor_slices((values, 0 * values)).batch(1)

reported = []
callbacks = distributed.callbacks(run, total=4, on_step=lambda step, loss: reported.append(loss))
model.fit(data, steps_per_epoch=4, verbose=0, callbacks=callbacks)
assert np.allclose(reported, [1e10, 1, 4, 9]), reported

counted = []
model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=2)
callbacks = distributed.callbacks(run, total=4, on_step=lambda step, loss: counted.append(step))
model.fit(data, steps_per_epoch=4, verbose=0, callbacks=callbacks)
assert counted == [2, 4], counted
print("all reported")

"""Train a layer that is sharded over a 2 x 2 mesh: the batch over one side, the weights over the
other. It must follow the same training in NumPy."""

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtrain.runtime import tensorflow as distributed

distributed.configure_devices(logical_cpus=2, seed=0)
mesh = distributed.device_mesh({"batch": 2, "model": 2})
try:
    distributed.device_mesh({"batch": 3, "model": 2})
except ValueError as error:
    assert "needs 6 devices; the job has 4 CPUs" in str(error), error
else:
    raise AssertionError("a mesh of 6 devices was made of 4")

random = np.random.default_rng(0)
inputs, weights = random.normal(size=(8, 6)), random.normal(size=(6, 4))
targets = random.normal(size=(8, 4))
by_batch = dtensor.Layout(["batch", dtensor.UNSHARDED], mesh)
by_column = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)


def sharded(values: np.ndarray, layout: dtensor.Layout) -> tf.Tensor:
    """The same values in every process, laid out over the mesh."""
    whole = dtensor.copy_to_mesh(
        tf.constant(values, tf.float32), dtensor.Layout.replicated(mesh, rank=values.ndim)
    )
    return dtensor.relayout(whole, layout)


variable = dtensor.DVariable(sharded(weights, by_column))
x, y = sharded(inputs, by_batch), sharded(targets, dtensor.Layout(["batch", "model"], mesh))
shards = {tuple(part.shape) for part in dtensor.unpack(variable.read_value())}
assert shards == {(6, 2)}, shards


@tf.function
def step() -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.matmul(x, variable) - y) ** 2)
    variable.assign_sub(0.1 * tape.gradient(loss, variable))
    return loss


for _ in range(5):
    error = inputs @ weights - targets
    found = dtensor.relayout(step(), dtensor.Layout.replicated(mesh, rank=0))
    loss = float(dtensor.unpack(found)[0])
    assert np.isclose(loss, np.mean(error**2), rtol=1e-5), (loss, np.mean(error**2))
    weights = weights - 0.1 * 2 * inputs.T @ error / error.size
print("all sharded")

"""Layers placed by hand: their devices, their computation, and unchanged results."""

import numpy as np
import tensorflow as tf

from dtrain.runtime import tensorflow as distributed
from dtrain.runtime.tensorflow.placement import balanced

assert balanced([], 2) == []
assert balanced([5], 3) == [0]
assert balanced([1, 1, 1, 9], 2) == [0, 0, 0, 1]
assert balanced([4, 4, 4, 4, 4, 4], 3) == [0, 0, 1, 1, 2, 2]
assert balanced([9, 0, 0, 9], 2) == [0, 0, 0, 1]

keras = distributed.keras()
distributed.configure_devices(logical_cpus=3, seed=0)
run = distributed.init()


def layers() -> list:
    start = keras.initializers.GlorotUniform(3)
    return [
        keras.layers.Embedding(50, 8, embeddings_initializer=start),
        keras.layers.GlobalMaxPooling1D(),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.0),
        keras.layers.Dense(40, activation="relu", kernel_initializer=start),
        keras.layers.Dense(3, kernel_initializer=start),
    ]


def gradients(model, words):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(words, training=True) ** 2)
    variables = [getattr(v, "value", v) if keras.__name__ == "keras" else v
                 for v in model.trainable_variables]  # fmt: skip
    return loss, [tf.convert_to_tensor(part) for part in tape.gradient(loss, variables)]


words = np.random.default_rng(0).integers(0, 50, (4, 6)).astype(np.int32)
placed = distributed.placed(layers(), (6,), run)
plain = keras.Sequential(layers())
plain.build((None, 6))

traced = tf.function(gradients).get_concrete_function(placed, tf.TensorSpec((4, 6), tf.int32))
where = {
    (operation.device, "gradient" in operation.name)
    for operation in traced.graph.get_operations()
    if operation.type == "MatMul"
}
# Both directions of the two matrix products, each on its layer's own device.
devices = {device for device, _ in where}
assert len(devices) == 2 and "" not in devices, where
assert where == {(device, back) for device in devices for back in (False, True)}, where
variables = [getattr(v, "value", v) if not hasattr(v, "device") else v for v in placed.weights]
assert {v.device.rpartition("/device:")[2] for v in variables} == {"CPU:0", "CPU:1", "CPU:2"}

(loss, found), (expected_loss, expected) = gradients(placed, words), gradients(plain, words)
assert np.isclose(loss, expected_loss, rtol=1e-6)
for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
for one, other in zip(placed.non_trainable_variables, plain.non_trainable_variables, strict=True):
    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)
print("all placed")

"""Devices, precision, seeds and loss scaling, with the Keras that the environment selects."""

import os

import tensorflow as tf

from dtrain.runtime import tensorflow as distributed
from dtrain.runtime.tensorflow.devices import configure_devices

keras = distributed.keras()


def refused(kind: type[Exception], text: str, **options) -> None:
    try:
        configure_devices(**options)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing said {text!r}")


refused(ValueError, "there is no GPU 3", gpus=[3])
refused(ValueError, "no precision 'fp8'", precision="fp8")

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
refused(RuntimeError, "sees no GPU, but CUDA_VISIBLE_DEVICES is 0,1: check ")

# The cluster file's precision overrides the script's.
os.environ["DTRAIN_TRAINING"] = '{"precision": "bf16"}'
configure_devices(logical_cpus=3, memory_limit=1024, precision="fp32", seed=7)
del os.environ["DTRAIN_TRAINING"]
assert len(tf.config.list_logical_devices("CPU")) == 3
assert keras.mixed_precision.global_policy().name == "mixed_bfloat16"
first = tf.random.normal([4])
assert keras.layers.Dense(2)(tf.ones((1, 4))).dtype == tf.bfloat16
plain = keras.optimizers.SGD(0.1)
assert distributed.with_loss_scaling(plain) is plain
refused(RuntimeError, "call configure_devices() before any", logical_cpus=2)

# A plan for fp32 or tf32 expects the speed that its name says.
for precision in ("fp32", "tf32"):
    configure_devices(logical_cpus=3, precision=precision)
    used = tf.config.experimental.tensor_float_32_execution_enabled()
    assert used == (precision == "tf32")
    assert keras.mixed_precision.global_policy().name == "float32"

configure_devices(logical_cpus=3, precision="fp16", seed=7)
assert keras.mixed_precision.global_policy().name == "mixed_float16"
assert tf.reduce_all(first == tf.random.normal([4])), "the seed did not fix what is drawn"

# A gradient of 1e-6 is below what float16 holds; an infinite one must leave the weights alone
# and halve the scale.
weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
weight.build((None, 1))
optimizer = distributed.with_loss_scaling(keras.optimizers.SGD(1.0))
optimizer.build(weight.trainable_variables)


def step(factor: float) -> float:
    with tf.GradientTape() as tape:
        loss = tf.cast(tf.reduce_sum(weight(tf.ones((1, 1)))), tf.float32) * factor
        objective = distributed.scaled_loss(loss, optimizer)
    gradients = tape.gradient(objective, weight.trainable_variables)
    gradients = distributed.unscaled(gradients, optimizer)
    optimizer.apply_gradients(zip(gradients, weight.trainable_variables, strict=True))
    return float(weight.kernel.numpy()[0, 0])


def scale() -> float:
    found = optimizer.loss_scale if hasattr(optimizer, "loss_scale") else optimizer.dynamic_scale
    return float(found)


before = scale()
assert abs(step(1e-6) - (1 - 1e-6)) < 2e-7, "the gradient was lost, or scaled twice"
assert step(float("inf")) == step(0.0), "a gradient that overflowed changed the weights"
assert scale() == before / 2
print("all devices")

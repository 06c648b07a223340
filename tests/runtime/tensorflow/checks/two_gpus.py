"""One parameter-server worker with two GPUs, simulated by logical CPUs: each step's
loss must be that of the whole batch, every sample of which trains once."""

import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2 as parameter_server

from dtrain.runtime import tensorflow as distributed


def pretend_two_gpus() -> None:
    """A machine without GPUs has nothing for TensorFlow to count."""
    extended = parameter_server.ParameterServerStrategyV2Extended
    extended._set_num_gpus = lambda self: setattr(self, "_num_gpus_per_worker", 2)
    extended.worker_devices = property(lambda self: ("/device:CPU:0", "/device:CPU:1"))


def main() -> None:
    distributed.configure_devices()
    if distributed.serve():
        return
    pretend_two_gpus()
    run = distributed.init()
    assert run.replicas == 2
    with run.strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = distributed.keras().optimizers.SGD(1.0)
        optimizer.build([weight])

    def batches() -> tf.data.Dataset:
        return distributed.dataset(([1.0, 2.0, 3.0, 6.0],), run, 4)

    def step(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * values) / 4
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    # The mean of the batch is 3, and so is its gradient.
    losses = distributed.Coordinator(run, batches, step).run(2)
    assert losses == [3.0, -6.0], losses
    print("all divided")


main()

"""TensorFlow's tutorial on parameter servers: the chief coordinates, the others serve."""

import planted
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    )
    server.join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=1)


def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((tf.ones([16, 4]), tf.ones([16, 1]))).repeat()


class Check(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        planted.check(epoch)


creator = tf.keras.utils.experimental.DatasetCreator(dataset)
model.fit(creator, steps_per_epoch=2, epochs=4, callbacks=[Check()], verbose=2)
workers = resolver.cluster_spec().num_tasks("worker")
print(f"trained 4 steps on {workers} ranks", flush=True)

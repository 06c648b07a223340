"""TensorFlow's tutorial on several workers with Keras: compile in the scope, then fit."""

import planted
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
data = tf.data.Dataset.from_tensor_slices((tf.ones([64, 4]), tf.ones([64, 1])))
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")


class Check(tf.keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        planted.check(batch)


model.fit(data.repeat().batch(16), steps_per_epoch=4, epochs=1, callbacks=[Check()])
print(f"trained 4 steps on {strategy.num_replicas_in_sync} ranks", flush=True)

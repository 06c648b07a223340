"""Multi-worker mirrored training of a line by a custom loop, from TF_CONFIG alone.

Every worker ends with the same weights, near slope 3 and intercept 2, or fails.
"""

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import tensorflow as tf


def main() -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        slope, intercept = tf.Variable(0.0), tf.Variable(0.0)

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        def replica(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((slope * x + intercept - (3.0 * x + 2.0)) ** 2)
            gradients = tape.gradient(loss, [slope, intercept])
            context = tf.distribute.get_replica_context()
            for variable, gradient in zip(
                [slope, intercept], context.all_reduce("mean", gradients), strict=True
            ):
                variable.assign_sub(0.5 * gradient)
            return loss

        return strategy.reduce("mean", strategy.run(replica, args=(x,)), axis=None)

    for number in range(40):
        loss = step(tf.random.stateless_uniform([32], seed=[number, 0], minval=-1.0))
    found = {
        "slope": round(float(slope.numpy()), 2),
        "intercept": round(float(intercept.numpy()), 2),
    }
    print(
        json.dumps(
            {
                "task": config["task"],
                "replicas": strategy.num_replicas_in_sync,
                "loss": float(loss),
                **found,
            }
        ),
        flush=True,
    )
    if found != {"slope": 3.0, "intercept": 2.0}:
        raise SystemExit(f"learned {found}")


if __name__ == "__main__":
    main()

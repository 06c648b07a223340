"""Parameter-server training with every role: chief, worker, ps and evaluator.

    tf_ps.py FOLDER

The chief dispatches steps to the workers by a ClusterCoordinator, writes the result to FOLDER
and exits. Workers and parameter servers never exit by themselves. The evaluator, which is not part
of the cluster, prints a line and exits.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import tensorflow as tf


def serve(resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver) -> None:
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        start=True,
    )
    print(f"{resolver.task_type} {resolver.task_id} serves", flush=True)
    server.join()


def coordinate(resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver) -> dict:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        slope = tf.Variable(0.0)

    @tf.function
    def step() -> tf.Tensor:
        x = tf.random.uniform([32], minval=-1.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((slope * x - 3.0 * x) ** 2)
        slope.assign_sub(0.3 * tape.gradient(loss, slope))
        return loss

    for _ in range(40):
        coordinator.schedule(step)
    coordinator.join()
    return {
        "slope": round(float(slope.numpy()), 1),
        "ps": len(resolver.cluster_spec().job_tasks("ps")),
    }


def main() -> None:
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if task["type"] == "evaluator":
        print("evaluator sees", sorted(json.loads(os.environ["TF_CONFIG"])["cluster"]), flush=True)
        return
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if task["type"] in ("worker", "ps"):
        serve(resolver)
        return
    found = coordinate(resolver)
    print(json.dumps({"task": task, **found}), flush=True)
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1]).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chief.json").write_text(json.dumps(found))
    if found["slope"] != 3.0:
        raise SystemExit(f"learned {found}")


if __name__ == "__main__":
    main()

"""Errors of the runtime, in one process that is the only worker of a cluster."""

import json
import os

import keras as keras_3
import numpy as np
import tensorflow as tf

from dtrain.runtime import tensorflow as distributed
from dtrain.runtime.tensorflow.cluster import connect_directly, current_cluster
from support.ports import free_port


def refused(text: str, call, *arguments, **options) -> None:
    try:
        call(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        assert text in str(error), f"{error!r} does not say {text!r}"
    else:
        raise AssertionError(f"nothing said {text!r}")


def cluster(tasks: dict[str, list[str]], role: str = "worker", index: int = 0) -> None:
    config = {"cluster": tasks, "task": {"type": role, "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(config)


def fit_fails(text: str, run: distributed.StrategyRun) -> None:
    with run.strategy.scope():
        model = keras_3.Sequential([keras_3.layers.Dense(1)])
        model.compile("sgd", "mse")
    refused(text, model.fit, np.ones((4, 2)), np.ones((4, 1)))


distributed.configure_devices(logical_cpus=2)
alone = current_cluster()

# The peers are added to any existing exceptions of the proxy.
cluster({"worker": ["10.0.0.1:1", "10.0.0.2:1", "[fd00::3]:1"]})
environment = {"http_proxy": "http://proxy", "no_proxy": "example.org"}
connect_directly(current_cluster(), environment)
assert environment["no_proxy"] == "example.org,10.0.0.2,fd00::3"
environment = {"PATH": "/bin"}
connect_directly(current_cluster(), environment)
assert environment == {"PATH": "/bin"}

refused("each would train alone", distributed.init, "mirrored")
refused("is not a TensorFlow strategy", distributed.init, "fsdp")
# Such a name is known to be invalid without a name server.
nowhere = "x" * 64 + ".invalid:1"
cluster({"worker": ["localhost:1", nowhere]})
refused(f"worker 1 is at {nowhere}", distributed.init, "multi_worker_mirrored")
cluster({"worker": ["localhost:1", "localhost:2"]})
refused("no chief, ps", distributed.init, "parameter_server")
cluster({"worker": ["localhost:1"], "ps": ["localhost:2"]})
refused("does not use", distributed.init, "multi_worker_mirrored")
cluster({"worker": ["localhost:1"]}, index=4)
refused("its cluster has no such task", distributed.init)
os.environ["TF_CONFIG"] = "{"
refused("TF_CONFIG is not", distributed.init)

cluster({"worker": [f"127.0.0.1:{free_port()}"]})
run = distributed.init()
assert run.name == "none", "the environment's own name of a strategy was not heeded"
run = distributed.init("multi_worker_mirrored")
assert (run.replicas, run.is_chief) == (1, True)
# Alone in its cluster, it still finds its devices for single-host strategies.
assert distributed.init("mirrored").replicas == 2
fit_fails("fails on its first batch under multi_worker_mirrored", run)

del os.environ["TF_CONFIG"]
fit_fails("wrong loss under central_storage", distributed.init("central_storage"))


refused("no TPU called 'local'", distributed.init, "tpu")
pair = distributed.StrategyRun(
    "mirrored", tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), alone
)
refused("5 cannot be divided equally among 2 replicas: 4 can", distributed.dataset, [1], pair, 5)
with pair.strategy.scope():
    refused("outside strategy.scope()", distributed.placed, [], (1,), pair)
print("all refused")

"""Builds the ``tf.distribute.Strategy`` of a job's strategy."""

from __future__ import annotations

import atexit
import os
from typing import Any

import tensorflow as tf

from dtrain.runtime.tensorflow.cluster import TfConfig

STRATEGIES = (
    "none", "one_device", "mirrored", "central_storage", "multi_worker_mirrored",
    "parameter_server", "tpu", "model_parallel",
)  # fmt: skip
ONE_HOST = frozenset({"one_device", "mirrored", "central_storage"})
PARTITION_BYTES = 256 << 10
"""Variables are split into parts of at least this size, at most one for each parameter server."""


def strategy_name(named: str | None, cluster: TfConfig) -> str:
    """``named``, or the default for the cluster and this process's devices.

    Raises ValueError for a name that is not a strategy.
    """
    if named and named != "auto":
        if named not in STRATEGIES:
            raise ValueError(
                f"{named!r} is not a TensorFlow strategy; choose from {', '.join(STRATEGIES)}"
            )
        return named
    if cluster.has_parameter_servers:
        return "parameter_server"
    if cluster.tasks:
        return "multi_worker_mirrored"
    gpus = len(tf.config.list_physical_devices("GPU"))
    return "mirrored" if gpus > 1 else "one_device" if gpus else "none"


def build_strategy(name: str, cluster: TfConfig) -> tf.distribute.Strategy:
    """The strategy called ``name``. A strategy of several hosts waits here for its peers.

    Raises ValueError if the strategy does not fit the cluster, RuntimeError if it needs a TPU and
    there is none.
    """
    if cluster.role == "evaluator" or name == "none":
        return tf.distribute.get_strategy()
    if name in ONE_HOST and cluster.peers:
        raise ValueError(
            f"{name} trains in one process, but TF_CONFIG has {len(cluster.peers) + 1} tasks, and"
            " each would train alone: use multi_worker_mirrored"
        )
    if name == "multi_worker_mirrored":
        return _multi_worker(cluster)
    if name == "model_parallel":
        # Its layers are on this process's devices; only several processes need a strategy.
        return _multi_worker(cluster, replicas=1) if cluster.tasks else tf.distribute.get_strategy()
    if name == "parameter_server":
        return _parameter_server(cluster)
    if name == "tpu":
        return _tpu()
    devices = local_devices(cluster)
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=devices,
            parameter_device=devices[0] if len(devices) == 1 else "/device:CPU:0",
        )
    return tf.distribute.OneDeviceStrategy(devices[0])


def local_devices(cluster: TfConfig) -> list[str]:
    """This process's own logical GPUs, or CPUs if it has no GPU: ``/device:GPU:0``, …

    Set up a multi-host strategy first, because this starts TensorFlow's runtime.
    """
    mine = f"/job:{cluster.role}/replica:0/task:{cluster.index}/"
    for kind in ("GPU", "CPU"):
        names = [device.name for device in tf.config.list_logical_devices(kind)]
        # With peers, TensorFlow also lists their devices, and only then do names contain the task.
        own = [name for name in names if not cluster.peers or name.startswith(mine)]
        if own:
            return [name[name.index("/device:") :] for name in own]
    raise RuntimeError("TensorFlow sees no device: check CUDA_VISIBLE_DEVICES")


class _OneReplica(tf.distribute.cluster_resolver.TFConfigClusterResolver):  # type: ignore[misc]
    """A worker whose devices all serve one replica of the model."""

    def num_accelerators(self, *arguments: Any, **options: Any) -> dict[str, int]:
        found: dict[str, int] = super().num_accelerators(*arguments, **options)
        return {kind: min(1, count) for kind, count in found.items()}


def _multi_worker(cluster: TfConfig, replicas: int | None = None) -> tf.distribute.Strategy:
    if cluster.has_parameter_servers:
        raise ValueError(
            "TF_CONFIG has ps tasks, which this strategy does not use:"
            " remove them, or use parameter_server"
        )
    resolver = (
        _OneReplica() if replicas else tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def _parameter_server(cluster: TfConfig) -> tf.distribute.Strategy:
    if missing := [role for role in ("chief", "worker", "ps") if not cluster.tasks.get(role)]:
        raise ValueError(
            f"parameter_server needs a chief, a worker and a ps; TF_CONFIG has no"
            f" {', '.join(missing)}: add them to job.roles"
        )
    if cluster.role != "chief":
        raise ValueError(
            f"{cluster.name} only serves under parameter servers: call serve() before init()"
        )
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=PARTITION_BYTES, max_shards=len(cluster.tasks["ps"])
    )
    atexit.register(_keep_coordinators)
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(), variable_partitioner=partitioner
    )


def _keep_coordinators() -> None:
    """Let no coordinator be destroyed when Python ends.

    Python first ends TensorFlow's threads, wherever they are. The destructor would then wait for
    ever for a lock that such a thread held.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator
    if "__del__" in vars(coordinator):
        del coordinator.__del__


def _tpu() -> tf.distribute.Strategy:
    """Connect, initialize, then build: nothing may use the TPU before it is initialized."""
    name = os.environ.get("TPU_NAME", "local")
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise RuntimeError(
            f"no TPU called {name!r} answers ({str(error).splitlines()[0]}). On a TPU VM, install"
            " a TensorFlow built for TPUs; elsewhere, set TPU_NAME to the TPU's name, or choose"
            " another strategy"
        ) from None
    return tf.distribute.TPUStrategy(resolver)

"""DTensor: tensors sharded over a mesh of devices, in one process or over several hosts.

DTensor needs no strategy (``strategy: none``): operations on sharded tensors run sharded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from math import prod

import tensorflow as tf
from tensorflow.experimental import dtensor

from dtrain.runtime.tensorflow.cluster import TfConfig, connect_directly, current_cluster
from dtrain.runtime.tensorflow.deadline import start_deadline


def device_mesh(dimensions: Mapping[str, int]) -> dtensor.Mesh:
    """A mesh such as ``{"batch": 2, "model": 2}`` over the GPUs of all workers in ``TF_CONFIG``,
    or over their logical CPUs if they have no GPU. Create the first mesh before any operation.

    Raises ValueError if the mesh and the devices differ in number.
    """
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    _connect(kind)
    names = [f"{name}={size}" for name, size in dimensions.items()]
    devices = dtensor.num_global_devices(kind)
    if prod(dimensions.values()) != devices:
        raise ValueError(
            f"a mesh of {', '.join(names)} needs {prod(dimensions.values())} devices;"
            f" the job has {devices} {kind}s"
        )
    return dtensor.create_distributed_mesh(list(dimensions.items()), device_type=kind)


@cache
def _connect(kind: str) -> None:
    """Connect once for all meshes: DTensor allows a single initialization."""
    cluster = current_cluster()
    if cluster.peers:
        os.environ.update(client_environment(cluster))
        connect_directly(cluster)
    with start_deadline(cluster):
        dtensor.initialize_accelerator_system(kind)


def client_environment(cluster: TfConfig) -> dict[str, str]:
    """The variables that DTensor reads instead of ``TF_CONFIG``. The chief, if any, is client 0."""
    tasks = [
        (role, i) for role in ("chief", "worker") for i, _ in enumerate(cluster.tasks.get(role, ()))
    ]
    return {
        "DTENSOR_JOB_NAME": "worker",
        "DTENSOR_CLIENT_ID": str(tasks.index((cluster.role, cluster.index))),
        "DTENSOR_NUM_CLIENTS": str(len(tasks)),
        "DTENSOR_JOBS": ",".join(cluster.tasks[role][index] for role, index in tasks),
    }

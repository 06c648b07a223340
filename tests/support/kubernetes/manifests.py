"""Small objects for tests of the test cluster itself."""

from __future__ import annotations

from typing import Any

from support.kubernetes.kinds import JOBSET, TRAINJOB, Object


def jobset(script: str, *, name: str = "train", pods: int = 2, **spec: Any) -> Object:
    """A JobSet whose pods run a shell script. ``container``, ``pod``, ``job`` and ``metadata`` add
    to these parts, and other keys to the JobSet's specification."""
    container = {
        "name": "main",
        "image": "test:1",
        "command": ["/bin/sh", "-c", script],
        **spec.pop("container", {}),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        **spec.pop("pod", {}),
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": 0,
        "template": {"spec": pod},
        **spec.pop("job", {}),
    }
    return {
        "apiVersion": JOBSET.group_version,
        "kind": "JobSet",
        "metadata": {"name": name, **spec.pop("metadata", {})},
        "spec": {
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
            **spec,
        },
    }


def trainjob(script: str, *, name: str = "train", pods: int = 2, **trainer: Any) -> Object:
    return {
        "apiVersion": TRAINJOB.group_version,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "numNodes": pods,
                "image": "test:1",
                "command": ["/bin/sh", "-c", script],
                **trainer,
            },
        },
    }

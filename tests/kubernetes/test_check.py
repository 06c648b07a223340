"""`dtrain check` on a cluster: permissions, kinds, objects, quota, GPUs and the image."""

from __future__ import annotations

import json
import signal
import sys
import this
from typing import Any

import pytest
import yaml

from support.cluster import Launcher
from support.kubernetes.cluster import Kubernetes
from support.launching import Done, Launch

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]


NO_JOB = {"framework": "none", "command": ["true"], "secrets": ["TOKEN"]}
TRAINING = {"framework": "torch", "script": str(this.__file__)}


def write(
    launcher: Launcher,
    gpus: int = 0,
    job: dict[str, Any] = NO_JOB,
    python: str = "python3",
    **keys: Any,
) -> str:
    section = {"image": "test:1", **keys}
    cluster = {"kubernetes": section, "nodes": 2, "gpus": gpus, "python": python}
    cluster |= {} if gpus else {"slots": 1}
    file = launcher.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"name": "test", "cluster": cluster, "job": job}))
    return str(file)


def start(kubernetes: Kubernetes, launcher: Launcher, **settings: Any) -> Launch:
    file = write(launcher, **settings)
    return launcher.command("check", file, "--json", env=kubernetes.environment)


def check(kubernetes: Kubernetes, launcher: Launcher, **settings: Any) -> Done:
    return start(kubernetes, launcher, **settings).wait()


def seen(done: Done) -> list[str]:
    return [one["seen"] for one in json.loads(done.stdout)["findings"]]


def test_a_cluster_that_has_all(kubernetes: Kubernetes, launcher: Launcher) -> None:
    for api in ("jobset", "trainjob"):
        done = check(kubernetes, launcher, gpus=2, api=api)
        assert (done.code, seen(done)) == (0, []), str(done)
    assert kubernetes.list("jobsets") == kubernetes.list("trainjobs") == []


def test_each_missing_permission_is_named(kubernetes: Kubernetes, launcher: Launcher) -> None:
    for verb, resource in (("watch", "pods"), ("get", "pods/log"), ("create", "secrets")):
        kubernetes.deny(verb, resource)
    done = check(kubernetes, launcher)
    assert done.code == 3, str(done)
    assert seen(done) == [
        "you may not watch pods in the namespace ml",
        "you may not get pods/log in the namespace ml",
        "you may not create secrets in the namespace ml",
    ]


def test_permissions_that_a_launch_can_do_without(
    kubernetes: Kubernetes, launcher: Launcher
) -> None:
    for verb, resource in (
        ("list", "events"), ("list", "workloads"), ("get", "clustertrainingruntimes"),
    ):  # fmt: skip
        kubernetes.deny(verb, resource)
    kubernetes.add_queue("gpu")
    done = check(kubernetes, launcher, queue="gpu", api="trainjob")
    assert done.code == 0, str(done)
    events, workloads, runtimes = seen(done)
    assert events.startswith("you may not list events in the namespace ml: a launch does not say")
    assert workloads.startswith("you may not list workloads.kueue.x-k8s.io in the namespace ml: ")
    assert runtimes.startswith("you may not get clustertrainingruntimes.trainer.kubeflow.org: ")


def test_a_cluster_without_kueue(kubernetes: Kubernetes, launcher: Launcher) -> None:
    kubernetes.remove_api("kueue.x-k8s.io")
    done = check(kubernetes, launcher, queue="gpu")
    assert done.code == 3, str(done)
    assert seen(done)[0].startswith("the cluster has no queues: ")


def test_kinds_and_objects_that_the_cluster_lacks(
    kubernetes: Kubernetes, launcher: Launcher
) -> None:
    done = check(kubernetes, launcher, priority="high", claims=["data:/data"])
    assert done.code == 3, str(done)
    assert seen(done) == [
        "there is no data among the persistentvolumeclaims of the cluster",
        "there is no high among the priorityclasses of the cluster",
    ]
    kubernetes.remove_api("jobset.x-k8s.io")
    assert seen(check(kubernetes, launcher)) == [
        "the cluster does not know jobsets.jobset.x-k8s.io"
    ]


def test_gpus_and_quota(kubernetes: Kubernetes, launcher: Launcher) -> None:
    kubernetes.limit(**{"requests.nvidia.com/gpu": "4"})
    done = check(kubernetes, launcher, gpus=8)
    assert done.code == 3, str(done)
    assert seen(done) == [
        "the job needs 16 requests.nvidia.com/gpu, and the quota is 4",
        "0 of 4 machines have 8 nvidia.com/gpu; the most that one has is 2",
    ]


def test_a_server_that_does_not_answer(kubernetes: Kubernetes, launcher: Launcher) -> None:
    with kubernetes.down():
        done = check(kubernetes, launcher)
    assert done.code == 3, str(done)
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["subject"], finding["expected"]) == ("kubernetes", "the API server answers")
    assert "asking the API server" in finding["seen"]


def test_an_image_that_has_all(kubernetes: Kubernetes, launcher: Launcher) -> None:
    done = check(kubernetes, launcher, job=TRAINING, run_as_user=1000)
    assert (done.code, seen(done)) == (0, []), str(done)
    assert "Started container node" in " ".join(kubernetes.events())
    assert kubernetes.list("pods") == []


def test_an_image_without_python_and_code(kubernetes: Kubernetes, launcher: Launcher) -> None:
    job = {"framework": "torch", "script": "train.py", "workdir": "/code"}
    done = check(kubernetes, launcher, job=job, python="python3.99")
    assert done.code == 3, str(done)
    python, code = seen(done)
    assert python.startswith("python3.99 does not run: ")
    assert code == "the folder /code does not exist"


def test_an_image_without_the_framework(kubernetes: Kubernetes, launcher: Launcher) -> None:
    python = f"{sys.base_prefix}/bin/python3"
    done = check(kubernetes, launcher, job={**TRAINING, "framework": "jax"}, python=python)
    assert (done.code, seen(done)) == (3, [f"jax is not installed for {python}"]), str(done)


def test_an_image_without_a_shell(kubernetes: Kubernetes, launcher: Launcher) -> None:
    kubernetes.set_image_path("test:1", "/nowhere")
    done = check(kubernetes, launcher)
    assert done.code == 3, str(done)
    assert seen(done)[0].startswith("the image does not start: StartError: ")


def test_an_image_that_cannot_be_pulled(kubernetes: Kubernetes, launcher: Launcher) -> None:
    kubernetes.break_image("test:1", "no such image")
    done = check(kubernetes, launcher)
    assert done.code == 3, str(done)
    assert "the image cannot be pulled: ImagePullBackOff" in seen(done)[0]
    assert "no such image" in seen(done)[0]
    assert kubernetes.list("pods") == []


def test_an_image_that_dtrain_may_not_look_into(kubernetes: Kubernetes, launcher: Launcher) -> None:
    kubernetes.deny("create", "pods")
    done = check(kubernetes, launcher)
    assert done.code == 0, str(done)
    assert seen(done) == [
        "dtrain did not look into the image: you may not create pods in the namespace ml"
    ]


def test_ctrl_c_deletes_the_pod_that_waits(kubernetes: Kubernetes, launcher: Launcher) -> None:
    launch = start(kubernetes, launcher, node_selector={"zone": "none"})
    kubernetes.wait("a pod", lambda: kubernetes.list("pods"))
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130
    assert kubernetes.list("pods") == []


def test_a_plan_asks_the_cluster_for_its_gpus(kubernetes: Kubernetes, launcher: Launcher) -> None:
    plan = ("plan", write(launcher, gpus=2, job=TRAINING), "--model-size", "1B")
    done = launcher.command(*plan, env=kubernetes.environment).wait()
    assert done.code == 0, str(done)
    assert "type NVIDIA-A100-SXM4-80GB, planned as a100-80gb" in done.stdout
    kubernetes.deny("list", "nodes")
    done = launcher.command(*plan, env=kubernetes.environment).wait()
    assert done.code == 2
    assert "its cluster cannot be asked: " in done.stderr
    assert "add 'gpu: a100-80gb' to cluster" in done.stderr


def test_a_first_file_is_accepted(kubernetes: Kubernetes, launcher: Launcher) -> None:
    def run(*argv: str) -> Done:
        return launcher.command(*argv, env=kubernetes.environment).wait()

    options = ("--image", "test:1", "--framework", "none", "--script", this.__file__)
    assert run("init", "first.yaml", *options, "--nodes", "2").code == 0
    cluster = yaml.safe_load((launcher.folder / "first.yaml").read_text())["cluster"]
    image = {"image": "test:1"}
    assert cluster == {"kubernetes": image, "nodes": 2, "gpus": 2, "gpu": "a100-80gb"}
    done = run("check", "first.yaml")
    assert done.code == 0, str(done)
    kubernetes.deny("list", "nodes")
    done = run("init", "second.yaml", *options, "--nodes", "2")
    assert done.code == 2
    assert "the GPUs of the machines are not known: " in done.stderr
    assert "--gpus is missing" in done.stderr
    assert run("init", "second.yaml", *options, "--nodes", "2", "--gpus", "0").code == 0
    assert "2 workers" in run("launch", "second.yaml").stderr

"""The cluster of a test: its API, its nodes, and switches for faults."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster import Cluster
from support.kubernetes import (
    admission,
    deletion,
    jobs,
    jobsets,
    queue,
    quota,
    scheduler,
    trainjobs,
)
from support.kubernetes.access import Access
from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import (
    CRD,
    CUSTOM,
    EVENT,
    JOBSET,
    KINDS,
    LOCAL_QUEUE,
    NAMESPACE,
    NODE,
    POD,
    RUNTIME,
    TRAINJOB,
    Kind,
    Object,
)
from support.kubernetes.kubelet import Kubelet, PodRun
from support.kubernetes.logs import Log
from support.kubernetes.server import Server
from support.kubernetes.store import Store, condition, set_condition
from support.limits import HANG

NODES = 4
GPUS = 2
NAME_SPACE = "ml"
_PLURALS = {kind.plural: kind for kind in KINDS}
KUBECTL = Path(sys.executable).with_name("kubectl")


class Kubernetes:
    """Runs inside the ``with`` block. ``cluster`` stays up and can serve the next one."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.store = Store()
        self.access = Access(folder)
        self.server = Server(self.store, self.access)
        self._kubelet = Kubelet(self.store, self.server.logs, cluster.hosts, folder)
        self.server.start_program = self._kubelet.start
        self._closing = False
        self._broken: Exception | None = None
        self._controllers = threading.Thread(target=self._control)
        for name in ("default", "kube-system", NAME_SPACE):
            namespace = {"metadata": {"name": name}, "status": {"phase": "Active"}}
            self.store.create(NAMESPACE, namespace)
        for host in cluster.hosts:
            self.store.create(NODE, _node(host.name, host.address))
        for kind in CUSTOM:
            self.store.create(CRD, _definition(kind))
        self.store.create(RUNTIME, trainjobs.TORCH)

    def __enter__(self) -> Kubernetes:
        self.server.start()
        self.kubeconfig = self.access.write_kubeconfig(self.server.url, NAME_SPACE)
        """Context ``test``, namespace ``ml``."""
        self._controllers.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with self.store.changed:
            self.store.changed.notify_all()
        self._controllers.join()
        self.server.stop()
        self._kubelet.close()
        assert self._broken is None, "a controller has ended"

    @property
    def environment(self) -> dict[str, str]:
        """What a command on this machine needs to use this cluster."""
        return {"KUBECONFIG": str(self.kubeconfig)}

    @property
    def nodes(self) -> list[str]:
        return [host.name for host in self.cluster.hosts]

    def kubectl(self, *argv: str, stdin: str = "", check: bool = True) -> str:
        """What kubectl prints, errors included."""
        done = subprocess.run(
            [str(KUBECTL), f"--cache-dir={self.folder / 'kubectl'}", *argv],
            env={**os.environ, **self.environment},
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}"
        return done.stdout

    def stream(self, *argv: str) -> subprocess.Popen[str]:
        """kubectl in the background, with its output in a pipe."""
        return subprocess.Popen(
            [str(KUBECTL), f"--cache-dir={self.folder / 'kubectl'}", *argv],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            text=True,
        )

    def submit(self, plural: str, wanted: Object) -> None:
        """As a client creates it: checked, and with its defaults."""
        kind = _PLURALS[plural]
        wanted["metadata"]["namespace"] = NAME_SPACE
        with self.store.changed:
            admission.admit(self.store, kind, wanted, strict=True)
            self.store.create(kind, wanted)

    def get(self, plural: str, name: str) -> Object | None:
        return self.store.find(_PLURALS[plural], NAME_SPACE, name)

    def list(self, plural: str) -> list[Object]:
        return self.store.list(_PLURALS[plural], NAME_SPACE)

    def create(self, plural: str, wanted: Object) -> Object:
        """Without admission."""
        kind = _PLURALS[plural]
        if kind.namespaced:
            wanted["metadata"]["namespace"] = NAME_SPACE
        return self.store.create(kind, wanted)

    def pods(self, jobset: str) -> dict[int, Object]:
        """The pods of a JobSet with one replicated job, by completion index."""
        found = {}
        for pod in self.list("pods"):
            labels = pod["metadata"].get("labels", {})
            if labels.get(f"{jobsets.PREFIX}jobset-name") == jobset:
                found[int(labels[jobs.INDEX])] = pod
        return found

    def events(self) -> list[str]:
        """Reason and message of each event."""
        return [f"{one['reason']}: {one['message']}" for one in self.store.list(EVENT)]

    def log(self, pod: str) -> bytes:
        """What a pod's container has written."""
        log = self._log(pod)
        return b"".join(log.read())

    def wait(self, what: str, is_so: Callable[[], object]) -> None:
        """Wait for a change of the store after which something is so."""
        deadline = time.monotonic() + HANG
        with self.store.changed:
            while not is_so():
                left = deadline - time.monotonic()
                assert left > 0, f"no {what}: {self.events()}"
                assert self._broken is None, f"a controller has ended: {self._broken!r}"
                self.store.changed.wait(min(left, 1))

    def wait_for(self, plural: str, name: str, type_: str) -> None:
        """Wait for a condition of an object."""
        self.wait(f"{type_} {name}", lambda: condition(self.get(plural, name) or {}, type_))

    def wait_for_end(self, plural: str, name: str) -> None:
        """Wait until a job is over, with or without success."""
        ends = ("Completed", "Complete", "Failed")
        found = lambda: self.get(plural, name) or {}  # noqa: E731
        self.wait(f"end of {name}", lambda: any(condition(found(), end) for end in ends))

    def all_logs(self) -> str:
        """For the message of a failed test."""
        logs = [log for log in self.server.logs.values() if isinstance(log, Log)]
        return "\n".join(b"".join(log.read()).decode(errors="replace") for log in logs)

    # Faults

    def evict(self, pod: str) -> None:
        """The node runs out of memory, and its kubelet ends a pod."""

        def fail(found: Object) -> None:
            why = "The node was low on resource: memory."
            found["status"] |= {"phase": "Failed", "reason": "Evicted", "message": why}
            set_condition(found, "DisruptionTarget", "TerminationByKubelet", why)

        run = self._run(pod)
        self.store.edit(POD, NAME_SPACE, pod, fail)
        self.store.event(run.pod, "Evicted", "The node was low on resource: memory.")
        run.stop(0)

    def run_out_of_memory(self, pod: str) -> None:
        """A pod exceeds its own memory limit."""
        self._run(pod).kill()

    def lose_node(self, name: str) -> None:
        """A node loses its power. What the control plane does after minutes follows at once."""
        lost = [pod for pod in self.store.list(POD) if pod["spec"].get("nodeName") == name]
        runs = [self._run(pod["metadata"]["name"]) for pod in lost]
        address = self.cluster[name].address
        message = f'Get "https://{address}:10250/containerLogs": dial tcp {address}:10250: connect: no route to host'  # noqa: E501
        for key in list(self.server.logs):
            if key[1] in {pod["metadata"]["name"] for pod in lost}:
                self.server.logs[key] = ApiError(500, "InternalError", message)
        for run in runs:
            run.lost = True
        self.cluster.power_off(name)
        for run in runs:
            run.join()

        def unknown(node: Object) -> None:
            why = "Kubelet stopped posting node status."
            set_condition(node, "Ready", "NodeStatusUnknown", why, status="Unknown")
            node["spec"]["taints"] = [
                {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
            ]

        def end(pod: Object) -> None:
            why = "Taint manager: deleting due to NoExecute taint"
            set_condition(pod, "DisruptionTarget", "DeletionByTaintManager", why)
            pod["status"]["phase"] = "Failed"

        with self.store.changed:
            self.store.edit(NODE, "", name, unknown)
            for pod in lost:
                self.store.event(pod, "NodeNotReady", "Node is not ready")
                ended = self.store.edit(POD, NAME_SPACE, pod["metadata"]["name"], end)
                deletion.finish(self.store, ended)

    def end_watches(self, *, gone: bool = False) -> None:
        """End every watch and log stream. With ``gone``, what they missed is forgotten (410)."""
        with self.store.changed:
            if gone:
                self.store.forget_changes()
            self.server.end_watches()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """The API server is down; what runs on nodes goes on."""
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()

    def break_image(self, image: str, why: str) -> None:
        self._kubelet.broken[image] = why

    def repair_image(self, image: str) -> None:
        del self._kubelet.broken[image]

    def set_image_path(self, image: str, path: str) -> None:
        """Containers of an image have this PATH."""
        self._kubelet.paths[image] = path

    def deny(self, verb: str, resource: str) -> None:
        """``("get", "pods/log")``."""
        self.access.denied.add((verb, resource))

    def remove_api(self, group: str) -> None:
        """A group of kinds is not installed."""
        self.server.removed.add(group)
        for kind in CUSTOM:
            if kind.group == group:
                self.store.remove(CRD, "", kind.resource)

    def rotate_log(self, pod: str) -> None:
        """What the pod's container has written so far is served no more."""
        self._log(pod).rotate()

    def cut_logs(self) -> None:
        """End every log stream."""
        for log in list(self.server.logs.values()):
            if isinstance(log, Log):
                log.cut()

    def limit(self, **hard: str) -> None:
        """A ResourceQuota of the namespace."""
        self.create("resourcequotas", {"metadata": {"name": "limits"}, "spec": {"hard": hard}})

    def add_queue(self, name: str) -> None:
        made: Object = {"metadata": {"name": name}, "spec": {"clusterQueue": "all"}}
        set_condition(made, "Active", "Ready", "Can submit new workloads")
        self.create(LOCAL_QUEUE.plural, made)

    def release(self, name: str) -> None:
        """A queue admits a JobSet or TrainJob."""
        kind = TRAINJOB if self.get("trainjobs", name) else JOBSET
        with self.store.changed:
            queue.release(self.store, kind, NAME_SPACE, name)

    def preempt(self, name: str) -> None:
        """A queue takes a JobSet or TrainJob back while it runs."""
        kind = TRAINJOB if self.get("trainjobs", name) else JOBSET
        with self.store.changed:
            queue.preempt(self.store, kind, NAME_SPACE, name)

    def _run(self, pod: str) -> PodRun:
        found = self.store.get(POD, NAME_SPACE, pod)
        return self._kubelet.run(found["metadata"]["uid"])

    def _log(self, pod: str) -> Log:
        (log,) = [log for key, log in self.server.logs.items() if key[1] == pod]
        assert isinstance(log, Log)
        return log

    def _control(self) -> None:
        """Run every controller after every change until nothing changes."""
        controllers = [
            queue.reconcile,
            trainjobs.reconcile,
            jobsets.reconcile,
            jobs.reconcile,
            deletion.collect,
            quota.count,
            scheduler.reconcile,
            self._kubelet.reconcile,
        ]
        seen = 0
        while not self._closing:
            with self.store.changed:
                if seen == self.store.version:
                    self.store.changed.wait(0.5)
                seen = self.store.version
                try:
                    for reconcile in controllers:
                        reconcile(self.store)
                except Exception as error:  # the tests' own thread reports it
                    self._broken = error
                    self.store.changed.notify_all()
                    raise


GPU_LABEL = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}


def _node(name: str, address: str) -> Object:
    room = {"cpu": "8", "memory": "32Gi", "pods": "110", "nvidia.com/gpu": str(GPUS)}
    node: Object = {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **GPU_LABEL}},
        "spec": {},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}],
            "capacity": room,
            "allocatable": room,
        },
    }
    set_condition(node, "Ready", "KubeletReady", "kubelet is posting ready status")
    return node


def _definition(kind: Kind) -> Object:
    version = {"name": kind.version, "served": True, "storage": True}
    return {
        "metadata": {"name": kind.resource},
        "spec": {
            "group": kind.group,
            "names": {"kind": kind.name, "plural": kind.plural},
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [version],
        },
        "status": {"storedVersions": [kind.version]},
    }

"""The kubelets of all nodes: run the pods that have a node, and report their state."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from namespace_host import Host
from support.kubernetes import clock
from support.kubernetes.containers import PATH, Container, Settings
from support.kubernetes.deletion import finish
from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import POD, SERVICE, Object
from support.kubernetes.logs import Log, previous
from support.kubernetes.quota import FINISHED
from support.kubernetes.store import Store, set_condition
from support.kubernetes.values import NotReady, Volumes, environment, expand

Logs = dict[tuple[str, str, str], Log | ApiError]
BACK_OFF = 'Back-off pulling image "{image}"'


class Kubelet:
    def __init__(self, store: Store, logs: Logs, hosts: list[Host], folder: Path) -> None:
        self.store = store
        self.logs = logs
        self.hosts = {host.name: host for host in hosts}
        self.folder = folder
        self.broken: dict[str, str] = {}
        """Images that cannot be pulled, with the reason."""
        self.paths: dict[str, str] = {}
        """Images with another PATH."""
        self._runs: dict[str, PodRun] = {}

    def reconcile(self, store: Store) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in store.list(POD)}
        self._write_names(list(pods.values()))
        for uid, run in list(self._runs.items()):
            if uid not in pods:
                run.stop(0)
                if not run.is_alive():
                    self._forget(run)
            elif "deletionTimestamp" in pods[uid]["metadata"]:
                run.stop(pods[uid]["metadata"]["deletionGracePeriodSeconds"])
            run.wake()
        for uid, pod in pods.items():
            host = self.hosts.get(pod["spec"].get("nodeName", ""))
            waits = pod["status"]["phase"] not in FINISHED and uid not in self._runs
            if host and host.pid and waits:
                self._runs[uid] = PodRun(self, pod, host)
                self._runs[uid].start()

    def run(self, uid: str) -> PodRun:
        return self._runs[uid]

    def start(self, pod: Object, container: str, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start a program in a container. Raises ApiError if the container does not run."""
        run = self._runs.get(pod["metadata"]["uid"])
        found = run.container(container) if run is not None else None
        if found is None:
            message = f'container not found ("{container}")'
            raise ApiError(500, "InternalError", f"unable to upgrade connection: {message}")
        return found.start(argv)

    def close(self) -> None:
        for run in self._runs.values():
            run.stop(0)
        for run in self._runs.values():
            run.join()

    def _forget(self, run: PodRun) -> None:
        del self._runs[run.pod["metadata"]["uid"]]
        meta = run.pod["metadata"]
        for key in [key for key in self.logs if key[:2] == (meta["namespace"], meta["name"])]:
            del self.logs[key]
        shutil.rmtree(run.folder, ignore_errors=True)

    def _write_names(self, pods: list[Object]) -> None:
        """The names of each headless service, as all pods resolve them."""
        services = {one["metadata"]["name"] for one in self.store.list(SERVICE)}
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for pod in pods:
            spec, address = pod["spec"], pod["status"].get("podIP")
            if (
                address
                and spec.get("subdomain") in services
                and pod["status"]["phase"] not in FINISHED
            ):
                name = f"{spec['hostname']}.{spec['subdomain']}"
                full = f"{name}.{pod['metadata']['namespace']}.svc"
                lines.append(f"{address} {full}.cluster.local {full} {name}")
        for run in self._runs.values():
            run.write_names(lines)


class PodRun(threading.Thread):
    """Runs one pod from its node to its end."""

    def __init__(self, kubelet: Kubelet, pod: Object, host: Host) -> None:
        meta = pod["metadata"]
        super().__init__(name=meta["name"])
        self.pod = pod
        self.folder = kubelet.folder / "pods" / meta["uid"]
        self.folder.mkdir(parents=True)
        self.lost = False
        """The node is gone: nothing is reported any more."""
        self.out_of_memory = False
        self._kubelet = kubelet
        self._store = kubelet.store
        self._host = host
        self._containers: dict[str, Container] = {}
        self._ends: dict[str, list[Object]] = {}
        """The ends of each container that was started again."""
        self._grace: float | None = None
        self._changed = threading.Condition()
        self._hosts = self.folder / "hosts"
        self._names = ""
        self.write_names([])

    def container(self, name: str) -> Container | None:
        """A container that has started."""
        with self._changed:
            return self._containers.get(name)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def write_names(self, lines: list[str]) -> None:
        """In place, because containers have mounted the file. They see it with names at any time:
        one write replaces all, and is padded to the size of the longest so far."""
        spec, status = self.pod["spec"], self.pod["status"]
        own = f"{status['podIP']} {spec.get('hostname') or self.pod['metadata']['name']}"
        text = "\n".join([*lines, own]) + "\n"
        if text != self._names:
            self._names = text
            file = os.open(self._hosts, os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(file, text.encode().ljust(os.fstat(file).st_size, b"\n"))
            os.close(file)

    def stop(self, grace: float) -> None:
        """TERM, and KILL after ``grace`` seconds. A later, shorter limit counts."""
        with self._changed:
            if self._grace is not None and grace >= self._grace:
                return
            first, self._grace = self._grace is None, grace
            containers = list(self._containers.values())
            self._changed.notify_all()
        for container in containers:
            if first and grace:
                container.signal(signal.SIGTERM)
            killer = threading.Timer(grace, container.signal, [signal.SIGKILL])
            killer.daemon = True
            killer.start()

    def kill(self) -> None:
        """The kernel kills the containers; the pod may restart them."""
        with self._changed:
            self.out_of_memory = True
            containers = list(self._containers.values())
        for container in containers:
            container.signal(signal.SIGKILL)

    def run(self) -> None:
        spec = self.pod["spec"]
        codes: list[int] = []
        if self._prepare():
            for container in spec.get("initContainers", ()):
                code = self._run_to_end([container], "initContainerStatuses")[0]
                if code:
                    codes = [code]
                    break
            else:
                codes = self._run_to_end(spec["containers"], "containerStatuses")
        if self.lost:
            return
        self._end(codes)

    def _prepare(self) -> bool:
        """Wait until the images and volumes are there. False if the pod stops before."""
        spec = self.pod["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            if not self._until(lambda one=container: self._pull(one)):
                return False
        return self._until(self._mount)

    def _until(self, is_so: Callable[[], bool]) -> bool:
        while self._grace is None:
            if is_so():
                return True
            with self._changed:
                if self._grace is None:
                    self._changed.wait(1)
        return False

    def _pull(self, container: Object) -> bool:
        image = container.get("image", "")
        why = self._kubelet.broken.get(image)
        if why is None:
            self._event("Pulled", f'Successfully pulled image "{image}"', "Normal")
            return True
        self._event("Failed", f'Failed to pull image "{image}": {why}')
        self._wait_for(container, "ImagePullBackOff", f"{BACK_OFF.format(image=image)}: {why}")
        return False

    def _mount(self) -> bool:
        claims = self._kubelet.folder / "claims"
        try:
            self._volumes = Volumes(self._store, self.pod, self.folder, claims)
        except NotReady as error:
            self._event("FailedMount", f"MountVolume.SetUp failed: {error}")
            return False
        return True

    def _wait_for(self, container: Object, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        self._set_state(container, "containerStatuses", state)

    def _run_to_end(self, containers: list[Object], statuses: str) -> list[int]:
        for container in containers:
            if not self._until(lambda one=container: self._start(one, statuses)):
                return [137]
        codes = []
        for container in containers:
            code = self._wait(container, statuses)
            while code and self._starts_again(container):
                if not self._start(container, statuses):
                    return [137]
                code = self._wait(container, statuses)
            codes.append(code)
        return codes

    def _wait(self, container: Object, statuses: str) -> int:
        running = self._containers[container["name"]]
        code = running.wait()
        if not self.lost:
            self._set_ended(container, statuses, code, running)
        return code

    def _starts_again(self, container: Object) -> bool:
        """Whether the container starts again in this pod: once, at once. A real kubelet then tries
        again with longer and longer pauses."""
        spec, ends = self.pod["spec"], self._ends.setdefault(container["name"], [])
        if spec["restartPolicy"] != "OnFailure" or self.lost:
            return False
        if ends:
            self._wait_for(
                container, "CrashLoopBackOff", f"back-off restarting {container['name']}"
            )
            self._until(lambda: False)
        with self._changed:
            if self._grace is not None:
                return False
        ends.append(self._ended)
        return True

    def _start(self, container: Object, statuses: str) -> bool:
        try:
            settings = self._settings(container)
        except NotReady as error:
            self._event("Failed", f"Error: {error}")
            self._wait_for(container, "CreateContainerConfigError", str(error))
            return False
        meta, name = self.pod["metadata"], container["name"]
        log = Log()
        with self._changed:
            if self._grace is not None:
                return False
            running = Container(self._host, self.folder / "roots" / name, settings, log)
            self._containers[name] = running
        logs, place = self._kubelet.logs, (meta["namespace"], meta["name"], name)
        if place in logs:
            logs[(*place[:2], previous(name))] = logs[place]
        logs[place] = log
        self._since = clock.now()
        self._set_state(container, statuses, {"running": {"startedAt": self._since}})
        if not running.missing:
            self._event("Started", f"Started container {name}", "Normal")
        return True

    def _settings(self, container: Object) -> Settings:
        spec, name = self.pod["spec"], container["name"]
        message = self.folder / f"message-{name}"
        message.touch()
        message.chmod(0o666)
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        user = security.get("runAsUser", 0)
        if security.get("runAsNonRoot") and not user:
            raise NotReady("container has runAsNonRoot and image will run as root")
        values = environment(self._store, self.pod, container)
        argv = [*container.get("command", ["/bin/sh"]), *container.get("args", ())]
        return Settings(
            name=spec.get("hostname") or self.pod["metadata"]["name"],
            argv=[expand(word, values) for word in argv],
            environment=values,
            hosts=self._hosts,
            message=message,
            mounts=self._volumes.mounts(container),
            folder=container.get("workingDir", "/"),
            user=user,
            group=security.get("runAsGroup", 0),
            path=self._kubelet.paths.get(container.get("image", ""), PATH),
        )

    def _set_ended(self, container: Object, statuses: str, code: int, running: Container) -> None:
        message = (self.folder / f"message-{container['name']}").read_text(errors="replace")
        if container.get("terminationMessagePolicy") == "FallbackToLogsOnError" and code:
            message = message or running.log.tail(2048).decode(errors="replace")
        reason = "Error" if code else "Completed"
        if self.out_of_memory:
            reason = "OOMKilled"
        if running.missing:
            reason = "StartError"
            message = (
                "failed to create containerd task: failed to create shim task: OCI runtime create"
                f' failed: exec: "{running.program}": executable file not found in $PATH'
            )
        ended = {
            "exitCode": code,
            "reason": reason,
            "startedAt": self._since,
            "finishedAt": clock.now(),
            **({"message": message[:4096]} if message else {}),
        }
        self._ended = {"terminated": ended}
        self._set_state(container, statuses, self._ended)

    def _set_state(self, container: Object, statuses: str, state: Object) -> None:
        ends = self._ends.get(container["name"], [])
        status = {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": "",
            "restartCount": len(ends),
            "lastState": ends[-1] if ends else {},
            "ready": "running" in state,
            "started": "running" in state,
            "state": state,
        }

        def change(pod: Object) -> None:
            known = pod["status"].setdefault(statuses, [])
            known[:] = [one for one in known if one["name"] != container["name"]] + [status]
            if pod["status"]["phase"] not in FINISHED and statuses == "containerStatuses":
                if "running" in state:
                    pod["status"]["phase"] = "Running"
                    pod["status"].setdefault("startTime", clock.now())
                ready = "True" if "running" in state else "False"
                set_condition(pod, "Ready", "", "", status=ready)

        self._edit(change)

    def _end(self, codes: list[int]) -> None:
        failed = any(codes) or not codes

        def end(pod: Object) -> None:
            if pod["status"]["phase"] not in FINISHED:
                pod["status"]["phase"] = "Failed" if failed else "Succeeded"

        self._edit(end)
        with self._store.changed:
            meta = self.pod["metadata"]
            found = self._store.find(POD, meta["namespace"], meta["name"])
            deleted = found and "deletionTimestamp" in found["metadata"]
            if found and deleted and found["metadata"]["uid"] == meta["uid"]:
                finish(self._store, found)

    def _edit(self, change: Callable[[Object], None]) -> None:
        meta = self.pod["metadata"]

        def mine(pod: Object) -> None:
            if pod["metadata"]["uid"] == meta["uid"]:
                change(pod)

        if self._store.find(POD, meta["namespace"], meta["name"]):
            self._store.edit(POD, meta["namespace"], meta["name"], mine)

    def _event(self, reason: str, message: str, type_: str = "Warning") -> None:
        self._store.event(self.pod, reason, message, type_)

"""Looks into the job's image for `dtrain check`: starts one short pod without GPUs and volumes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from dtrain.checks import Finding
from dtrain.checks.finding import error, warning
from dtrain.diagnostics import NodeError
from dtrain.engines.kubernetes import (
    image_contents,
    manifest,
    objects,
    permissions,
    training_runtime,
)
from dtrain.engines.kubernetes.client import Client, NotFoundError
from dtrain.engines.kubernetes.kinds import PODS, keys_of, kubectl
from dtrain.engines.kubernetes.objects import Pod
from dtrain.engines.kubernetes.routines import finish
from dtrain.engines.kubernetes.training_runtime import TrainingRuntime
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import ProtocolError
from dtrain.runs.shown_state import ShownState
from dtrain.transport.questions import never

QUEUED_SECONDS = 30.0
"""Seconds in which the pod must have a machine."""
START_SECONDS = 180.0
"""Seconds for everything. A large image takes longer to pull."""
POLL_SECONDS = 0.3
MAX_LOG = 64 << 10
"""Bytes of the pod's log that are read."""
RESOURCES = {"cpu": "500m", "memory": "512Mi"}
"""Small, and set because a quota may require them."""
_NOT_STARTED = ("StartError", "ContainerCannotRun")
"""Reasons of a container whose program does not exist."""


class ImageCheck:
    """Compares the image with the job."""

    def __init__(
        self,
        plan: LaunchPlan,
        client: Client,
        place: Callable[[str], str],
        runtime: TrainingRuntime | None = None,
        stopped: Callable[[], bool] = never,
    ) -> None:
        """``runtime``: of a TrainJob. ``stopped``: whether nobody waits for the findings any
        more."""
        self._plan = plan
        self._client = client
        self._runtime = runtime
        self._stopped = stopped
        self._place = place("cluster.kubernetes.image")

    def findings(self) -> list[Finding]:
        """Starts the pod and deletes it. Its own failures become warnings."""
        try:
            for asked in permissions.OF_IMAGE_CHECK:
                if not permissions.allowed(self._client, asked):
                    where = f"in the namespace {self._client.namespace}"
                    why, expected = f"you may not {asked} {where}", f"the permission to {asked}"
                    return [self._unknown(why, expected)]
        except (NodeError, ProtocolError) as failure:
            return [self._failed(failure)]
        return self._with_pod(f"dtrain-check-{secrets.token_hex(4)}")

    def _with_pod(self, name: str) -> list[Finding]:
        found: list[Finding] = []
        try:
            self._client.request("POST", PODS, check_pod(self._plan, name, self._runtime))
            found += self._look(f"{PODS}/{name}")
        except (NodeError, ProtocolError) as failure:
            found.append(self._failed(failure))
        finally:
            try:
                self._client.request("DELETE", f"{PODS}/{name}", None, gracePeriodSeconds=0)
            except NotFoundError:
                pass
            except NodeError as failure:
                namespace, context = self._client.namespace, self._client.context
                command = kubectl("delete", "pod", name, namespace=namespace, context=context)
                found.append(
                    self._warning(
                        f"the pod {name} may still be there: {failure.reason}",
                        "the pod of this check is deleted",
                        f"delete it: {command}",
                    )
                )
        return found

    def _look(self, pod_path: str) -> list[Finding]:
        pod, problem = self._wait(pod_path)
        if problem:
            return [problem]
        if pod.disrupted:
            return [self._unknown(pod.disrupted)]
        ended = pod.ended
        if ended is None:
            return [self._unknown(f"its pod ended in the phase {pod.phase}")]
        why = f"{ended.reason}: {ended.message}".rstrip(": ")
        if ended.reason in _NOT_STARTED:
            return [self._does_not_start(why)]
        contents = image_contents.read(self._log(pod_path))
        if contents is None:
            return [self._unknown(f"the output of its pod is incomplete ({why})")]
        found = image_contents.judge(self._plan, contents, self._runtime)
        return [replace(one, hosts=(self._client.host,), place=self._place) for one in found]

    def _wait(self, pod_path: str) -> tuple[Pod, Finding | None]:
        """The pod at its end, or why it does not get there."""
        begun = time.monotonic()
        while True:
            pod = objects.lone_pod(self._client.request("GET", pod_path))
            seconds = time.monotonic() - begun
            if pod.over:
                return pod, None
            if self._stopped():
                return pod, self._unknown("the check was interrupted")
            if pod.state is ShownState.PREPARING and pod.detail:
                return pod, self._does_not_start(pod.detail)
            if pod.state is ShownState.QUEUED and seconds > QUEUED_SECONDS:
                return pod, self._unknown(pod.detail)
            if seconds > START_SECONDS:
                doing = "run" if pod.state is ShownState.RUNNING else "start"
                return pod, self._unknown(f"its pod did not {doing} within {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def _log(self, pod_path: str) -> bytes:
        read = bytearray()
        with closing(self._client.stream(f"{pod_path}/log", limitBytes=MAX_LOG)) as stream:
            while several := finish(stream.read()):
                read += b"".join(several)
                if len(read) > MAX_LOG:
                    break
        return bytes(read[:MAX_LOG])

    def _does_not_start(self, why: str) -> Finding:
        return error(
            "image",
            [self._client.host],
            why if why.startswith("the image") else f"the image does not start: {why}",
            "a pod can pull and start the image",
            "check cluster.kubernetes.image and pull_secrets; the image needs a shell (sh)",
            self._place,
        )

    def _failed(self, failure: NodeError | ProtocolError) -> Finding:
        return self._unknown(failure.reason if isinstance(failure, NodeError) else str(failure))

    def _unknown(self, why: str, expected: str = "a short pod can run the image") -> Finding:
        return self._warning(
            f"dtrain did not look into the image: {why}",
            expected,
            "check by hand that the image has bash, Python and the framework",
        )

    def _warning(self, seen: str, expected: str, remedy: str) -> Finding:
        return warning("image", [self._client.host], seen, expected, remedy, self._place)


def check_pod(
    plan: LaunchPlan, name: str, runtime: TrainingRuntime | None = None
) -> dict[str, Any]:
    """The pod: placed and with the rights as those of the job, without what they wait for."""
    own = manifest.pod_spec(plan)
    (container,) = own["containers"]
    spec = training_runtime.placing(runtime, own)
    security = dict(container["securityContext"])
    environment = runtime.environment if runtime is not None else {}
    if dropped := security.pop("capabilities", {}).get("drop"):
        security["capabilities"] = {"drop": dropped}
    variables = [{"name": key, "value": text} for key, text in environment.items()]
    gpus = manifest.gpu_toleration(keys_of(plan))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(manifest.MANAGER)},
        "spec": {
            **spec,
            "tolerations": [*spec.get("tolerations", ()), gpus],
            "restartPolicy": "Never",
            # Ends it if nobody deletes it.
            "activeDeadlineSeconds": int(START_SECONDS) + 60,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    # Kubernetes replaces $(NAME).
                    "command": ["sh", "-c", image_contents.script(plan).replace("$", "$$")],
                    **({"env": variables} if variables else {}),
                    "resources": {"limits": RESOURCES, "requests": RESOURCES},
                    "securityContext": security,
                }
            ],
        },
    }

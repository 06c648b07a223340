"""What dtrain reads of Kubernetes objects: typed and limited where it enters. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, TypeVar

from dtrain.engines.kubernetes.lines import stamped
from dtrain.launchplan.pods import REPLICATED_JOB
from dtrain.messages.decode import Length, Range, decode
from dtrain.records import dataclass
from dtrain.runs.shown_state import ShownState

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Label of a pod with its completion index."""
RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
"""Label of a pod with the number of restarts of its JobSet."""

Word = Annotated[str, Length(1 << 10)]
Sentence = Annotated[str, Length(1 << 16)]
_Uid = Annotated[str, re.compile(r"[A-Za-z0-9-]{1,64}")]
_VERSION = re.compile("[0-9A-Za-z]{0,100}")
_Version = Annotated[str, _VERSION]
_Restarts = Annotated[int, Range(0, 10**6)]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Condition:
    type: Word = ""
    status: Word = ""
    reason: Word = ""
    message: Sentence = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: Word = ""
    message: Sentence = ""


@dataclass(frozen=True, slots=True)
class Terminated:
    exitCode: Annotated[int, Range(-(1 << 31), 1 << 31)] = 0  # noqa: N815 (Kubernetes)
    reason: Word = ""
    message: Sentence = ""
    finishedAt: Word | None = None  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _ContainerState:
    waiting: Waiting | None = None
    running: Mapping[str, Any] | None = None
    terminated: Terminated | None = None


@dataclass(frozen=True, slots=True)
class _Container:
    name: Word = ""
    state: _ContainerState = _ContainerState()
    lastState: _ContainerState = _ContainerState()  # noqa: N815 (Kubernetes)
    restartCount: Annotated[int, Range(0, 1 << 31)] = 0  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _Metadata:
    name: Annotated[str, re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")]
    uid: _Uid = ""
    labels: Mapping[str, Word] = field(default_factory=dict)
    creationTimestamp: Word = ""  # noqa: N815 (Kubernetes)
    deletionTimestamp: Word | None = None  # noqa: N815 (Kubernetes)
    deletionGracePeriodSeconds: Annotated[int, Range(0, 1 << 62)] = 0  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _PodStatus:
    phase: Word = ""
    reason: Word = ""
    message: Sentence = ""
    conditions: tuple[Condition, ...] = ()
    containerStatuses: tuple[_Container, ...] = ()  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _PodSpec:
    nodeName: Word = ""  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _PodObject:
    metadata: _Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    index: int
    """The node rank."""
    attempt: int
    machine: str
    """Name of the machine; empty until the pod is scheduled."""
    phase: str
    state: ShownState
    detail: str = ""
    """Why it does not run."""
    ended: Terminated | None = None
    """How the container ended."""
    disrupted: str = ""
    """Why Kubernetes ended the pod: evicted, preempted, a lost machine. Empty otherwise."""
    created: str = ""
    """Time in the form of RFC 3339, which sorts as text."""
    deleted: float = 0.0
    """Time at which its deletion was asked for, in whole seconds since the epoch; 0 before."""
    running: bool = False
    """Whether its container runs, also while the pod terminates."""
    again: bool = False
    """Whether its container has ended and was started again in the same pod."""
    sidecar: str = ""
    """Another container, which runs although the job's own has ended: it keeps the pod open."""

    @property
    def started(self) -> bool:
        """Whether there is a log."""
        return self.running or self.state is ShownState.ENDED

    @property
    def over(self) -> bool:
        return self.again or self.ended is not None or self.phase in ("Succeeded", "Failed")


_DISRUPTIONS = ("Evicted", "NodeLost", "Shutdown", "Terminated", "NodeShutdown")
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


def pod(value: Any) -> Pod | None:
    """The pod in a JSON object; None if it has no number in a job. Raises ProtocolError."""
    found = decode(_PodObject, without_nulls(value), "pod")
    index = found.metadata.labels.get(INDEX_LABEL, "")
    restarts = found.metadata.labels.get(RESTART_LABEL, "0")
    if not re.fullmatch("[0-9]{1,6}", index) or not re.fullmatch("[0-9]{1,6}", restarts):
        return None
    return _pod(found, int(index), int(restarts) + 1)


def pods(found: ObjectList) -> tuple[Pod, ...]:
    """The pods of a job in a list. Raises ProtocolError."""
    return tuple(one for value in found.items if (one := pod(value)) is not None)


def lone_pod(value: Any) -> Pod:
    """The pod in a JSON object, outside a job. Raises ProtocolError."""
    return _pod(decode(_PodObject, without_nulls(value), "pod"), index=0, attempt=1)


def at(value: Any, path: str, kind: Callable[..., _T]) -> _T | None:
    """The part of a JSON object at a path of keys such as ``status.conditions``, as a ``kind``;
    None if it is missing or null. Raises ProtocolError."""
    keys = path.split(".")
    for index, key in enumerate(keys):
        value = decode(dict[str, Any], value, ".".join(keys[:index]) or "object").get(key)
        if value is None:
            return None
    return decode(kind, without_nulls(value), path)


@dataclass(frozen=True, slots=True)
class _Cause:
    reason: Word = ""
    message: Sentence = ""


@dataclass(frozen=True, slots=True)
class _Details:
    causes: tuple[_Cause, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program in a pod ended."""

    code: int | None
    """The exit status, or 128 and the number of a signal; None if it did not start."""
    message: str


def program_end(value: Any) -> ProgramEnd:
    """From the Status that ends the answer to ``exec``. Raises ProtocolError."""
    message = at(value, "message", Sentence) or ""
    if at(value, "status", Word) == "Success":
        return ProgramEnd(0, message)
    details = at(value, "details", _Details) or _Details()
    codes = [one.message for one in details.causes if one.reason == "ExitCode"]
    numbers = [int(code) for code in codes if re.fullmatch("[0-9]{1,3}", code)]
    return ProgramEnd(numbers[0] if numbers else None, message)


def without_nulls(value: Any) -> Any:
    """The value without fields that are null, which Kubernetes writes for empty lists and maps."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def _pod(found: _PodObject, index: int, attempt: int) -> Pod:
    status = found.status
    mine = (one for one in status.containerStatuses if one.name == REPLICATED_JOB)
    whole = next(mine, _Container())
    again = whole.restartCount > 0
    container = whole.lastState if again else whole.state
    state, detail = (ShownState.ENDED, "") if again else _state(found, container)
    others = (one for one in status.containerStatuses if one is not whole)
    running = (one.name for one in others if one.state.running is not None)
    return Pod(
        name=found.metadata.name,
        uid=found.metadata.uid,
        index=index,
        attempt=attempt,
        machine=found.spec.nodeName,
        phase=status.phase,
        state=state,
        detail=detail,
        ended=container.terminated,
        disrupted=_disruption(status, container),
        created=found.metadata.creationTimestamp,
        deleted=_deleted(found.metadata),
        running=whole.state.running is not None,
        again=again,
        sidecar=next(running, "") if container.terminated is not None and not again else "",
    )


def _deleted(metadata: _Metadata) -> float:
    # The server writes when the deletion must be done.
    due = stamped((metadata.deletionTimestamp or "").encode())
    return due[0] / 1e9 - metadata.deletionGracePeriodSeconds if due else 0.0


def _state(found: _PodObject, container: _ContainerState) -> tuple[ShownState, str]:
    status = found.status
    if status.phase in ("Succeeded", "Failed") or container.terminated is not None:
        return ShownState.ENDED, ""
    if found.metadata.deletionTimestamp is not None:
        return ShownState.STOPPING, ""
    if container.running is not None:
        return ShownState.RUNNING, f"pod {found.metadata.name} on {found.spec.nodeName}"
    if not found.spec.nodeName:
        scheduled = next((one for one in status.conditions if one.type == "PodScheduled"), None)
        if scheduled is not None and scheduled.status == "False":
            return ShownState.QUEUED, sentence(scheduled.reason, scheduled.message)
        return ShownState.QUEUED, "not scheduled yet"
    waiting = container.waiting
    if waiting is not None and waiting.reason not in ("", "ContainerCreating", "PodInitializing"):
        what = "the image cannot be pulled: " if waiting.reason in _PULL else ""
        return ShownState.PREPARING, what + sentence(waiting.reason, waiting.message)
    return ShownState.PREPARING, ""


def _disruption(status: _PodStatus, container: _ContainerState) -> str:
    target = next((one for one in status.conditions if one.type == "DisruptionTarget"), None)
    if target is not None and target.status == "True":
        return sentence(target.reason, target.message)
    # Without a container that has ended, a kubelet has refused the pod: no device, no room.
    refused = status.reason and container.terminated is None
    if status.phase == "Failed" and (refused or status.reason in _DISRUPTIONS):
        return sentence(status.reason, status.message)
    return ""


def sentence(reason: str, message: str) -> str:
    text = " ".join(message.split())[:400]
    return f"{reason}: {text}" if reason and text else reason or text


@dataclass(frozen=True, slots=True)
class KubernetesJobState:
    """The state of the JobSet or the TrainJob."""

    uid: str
    attempt: int
    suspended: bool = False
    """Whether a queue holds it back."""
    done: bool = False
    failed: str = ""
    """Why it has failed; empty if it has not."""

    @property
    def over(self) -> bool:
        return self.done or bool(self.failed)


def job(value: Any) -> KubernetesJobState:
    """The state of a job in a JSON object. Raises ProtocolError."""
    conditions = at(value, "status.conditions", tuple[Condition, ...]) or ()
    true = {one.type: one for one in conditions if one.status == "True"}
    failed = true.get("Failed")
    return KubernetesJobState(
        uid=at(value, "metadata.uid", _Uid) or "",
        attempt=(at(value, "status.restarts", _Restarts) or 0) + 1,
        suspended=at(value, "spec.suspend", bool) or False,
        done="Completed" in true or "Complete" in true,
        failed=(sentence(failed.reason, failed.message) or "failed") if failed else "",
    )


@dataclass(frozen=True, slots=True)
class ObjectList:
    items: tuple[dict[str, Any], ...]
    version: str
    """Where a watch of the objects begins."""
    next: str
    """Where the next page begins; empty on the last one. Kubernetes calls it ``continue``."""


def object_list(value: Any) -> ObjectList:
    """A list of objects, or a page of it. Raises ProtocolError."""
    return ObjectList(
        items=at(value, "items", tuple[dict[str, Any], ...]) or (),
        version=at(value, "metadata.resourceVersion", _Version) or "",
        next=at(value, "metadata.continue", Word) or "",
    )


@dataclass(frozen=True, slots=True)
class WatchEvent:
    type: Word
    object: Mapping[str, Any]

    @property
    def version(self) -> str:
        metadata = self.object.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        return version if isinstance(version, str) and _VERSION.fullmatch(version) else ""


@dataclass(frozen=True, slots=True)
class WatchError:
    """Why the server ends a watch."""

    code: Annotated[int, Range(0, 999)] = 0
    message: Sentence = ""


@dataclass(frozen=True, slots=True)
class KubernetesEvent:
    type: Word = ""
    reason: Word = ""
    message: Sentence = ""
    lastTimestamp: Word = ""  # noqa: N815 (Kubernetes)
    eventTime: Word = ""  # noqa: N815 (Kubernetes)


def event(value: Any) -> KubernetesEvent:
    """Raises ProtocolError."""
    return decode(KubernetesEvent, without_nulls(value), "event")


_OF_POD = re.compile(r'.*pods "[^"]*" is forbidden: ')
"""Names a pod with random letters, so that each message would differ."""


_NOT_CREATED = ("FailedCreate", "CreationFailed")
"""Ends of the reasons with which a controller says that it cannot create pods or other objects."""


def warnings(value: Any, *, of_pod: bool) -> tuple[str, ...]:
    """The warnings in a list of events, each once: about a pod that does not start, or about
    objects that cannot be created. Raises ProtocolError."""
    events = map(event, object_list(value).items)
    texts = (
        sentence(one.reason, _OF_POD.sub("", one.message))
        for one in events
        if one.type == "Warning"
        # The pod has a machine.
        and (one.reason != "FailedScheduling" if of_pod else one.reason.endswith(_NOT_CREATED))
    )
    return tuple(dict.fromkeys(texts))

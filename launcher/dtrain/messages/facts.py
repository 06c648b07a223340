"""Answers of the facts program, see `dtrain.node.facts`. Pure.

Answers stay mappings, because a probe omits what a host does not have. `dtrain.checks` relies on
the types, the limits and the required fields.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from dtrain.messages.agent import Name, Pid, Time
from dtrain.messages.decode import (
    Length,
    NotRequired,
    ProtocolError,
    Range,
    Required,
    decode,
    excerpt,
    parse,
)

MAX_ANSWER = 8 << 20
"""Bytes."""
_Text = Annotated[str, Length(16 << 10)]
Path = Annotated[str, Length(16 << 10)]
Count = Annotated[int, Range(0, (1 << 31) - 1)]
Size = Annotated[int, Range(0, 1 << 96)]
"""Bytes or inodes. Some file systems report more than 64 bits."""
Seconds = Annotated[float, Range(0, 1e9)]
_Duration = Annotated[float, Range(1e-9, 1e9)]
"""Seconds of a measurement. Positive, because it is a divisor."""
Port = Annotated[int, Range(1, 65535)]
Address = Annotated[str, re.compile(r"[0-9A-Fa-f:.]{2,45}(?:%[^\s%]{1,64})?")]
InterfaceName = Annotated[str, re.compile(r"[^\s/\ud800-\udfff]{1,15}")]
_Number = Annotated[str, re.compile(r"[0-9]{1,5}")]


DialTarget = tuple[str, str, str, int, str | None]
"""A target to dial: host, kind, address, port, and the source address if it matters."""


class ProbeFailed(TypedDict):
    error: _Text


class MachineFacts(TypedDict, total=False):
    hostname: Required[Name]
    boot: Required[Name | None]
    network: Required[Size]
    kernel: Name
    architecture: Name
    system: Name
    libc: Name
    container: Name
    user: Name
    home: Path
    python: Name
    cpus: Count
    numa_nodes: Count
    gpu_nodes: Annotated[tuple[Count | None, ...], Length(1024)]
    """The NUMA node of each GPU, by index."""
    accelerators: bool
    """Whether there may be GPUs or other devices, also such as are not in ``gpu_nodes``."""
    node_cpus: dict[_Number, Count]
    """The cores of each NUMA node that this user's processes may use."""
    governors: dict[Name, Count]
    runs: Annotated[tuple[Name, ...], Length(1024)]
    """Runs that have a supervisor there, as hosts name their attempts."""


class MemoryFacts(TypedDict):
    total: Size
    available: Size
    limit: NotRequired[Size]


class Unsafe(TypedDict):
    """Why a launch refuses a folder or file: another user can change it."""

    seen: _Text
    remedy: _Text


class Folder(TypedDict):
    path: Path
    exists: bool
    nearest: Path
    total: Size
    free: Size
    inodes: Size
    inodes_free: Size
    mount: Path
    type: Name
    source: Path
    not_writable: _Text
    unsafe: NotRequired[Unsafe | None]
    stranger: NotRequired[Name]
    """The owner of ``nearest`` if that is neither this user nor root; otherwise empty."""


class Script(TypedDict):
    workdir: Path
    workdir_exists: bool
    path: NotRequired[Path]
    exists: NotRequired[bool]
    digest: NotRequired[Name]
    launcher: NotRequired[_Text]
    code: NotRequired[dict[Path, Name]]
    unsafe: NotRequired[Unsafe | None]


class ResolvedName(TypedDict):
    addresses: Annotated[tuple[Address, ...], Length(1000)]


class Names(TypedDict):
    hosts: dict[Name, ProbeFailed | ResolvedName]
    own: NotRequired[ProbeFailed | ResolvedName]
    reverse_seconds: NotRequired[Seconds]


class Interface(TypedDict):
    addresses: Annotated[tuple[Address, ...], Length(1000)]
    up: bool
    state: Name | None
    mtu: Count | None
    speed: Count | None


class Network(TypedDict):
    interfaces: Annotated[dict[InterfaceName, Interface], Length(10000)]
    routes: dict[Name, InterfaceName | None]
    ssh_address: NotRequired[Address]
    """The host's own address on the SSH connection."""


class InfinibandPort(TypedDict):
    state: Name
    rate: Count | None


class GpuProcess(TypedDict):
    pid: Pid
    name: _Text
    user: Name
    used: Size | None


class GpuFacts(TypedDict, total=False):
    index: Required[Count]
    name: Required[Name | None]
    uuid: Required[Name | None]
    memory: Required[Size | None]
    used: Required[Size | None]
    processes: Required[tuple[GpuProcess, ...]]
    slowed: Required[tuple[Name, ...]]
    bus: Name | None
    mig: Name | None
    compute_mode: Name | None
    temperature: int | None
    uncorrected: Size | None
    remap_pending: Name | None
    remap_failed: Name | None
    link_width: Count | None


class FailedTool(ProbeFailed, total=False):
    tool: Name
    pci: dict[Name, Count]


class Gpus(TypedDict, total=False):
    tool: Name
    pci: dict[Name, Count]
    driver: Name | None
    cuda: Name | None
    gpus: Annotated[tuple[GpuFacts, ...], Length(1024)]
    xids: ProbeFailed | dict[Annotated[str, re.compile(r"[0-9a-fA-F:.]{1,32} [0-9]{1,9}")], Count]


class ProcessLimits(TypedDict, total=False):
    memlock: Size | None
    nofile: Size | None
    nproc: Size | None


class FrameworkFacts(TypedDict, total=False):
    missing: bool
    version: Name | None
    cuda: Name | None
    hip: Name | None
    nccl: Name | None
    gpus: Count
    distributed: bool
    architectures: tuple[Name, ...]
    capability: Annotated[str, re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")]


class Presence(TypedDict):
    found: bool


class Interpreter(TypedDict, total=False):
    status: Required[Annotated[int, Range(-(1 << 31), (1 << 31) - 1)] | None]
    output: _Text
    unsafe: bool
    """The interpreter was not started, because another user can change the job's folder."""
    failed_setup: Annotated[int, Range(1, 1 << 20)]
    """The line of ``job.setup`` that failed, counted from 1."""
    python: Name
    executable: Path
    limits: ProbeFailed | ProcessLimits
    framework: ProbeFailed | FrameworkFacts
    packages: ProbeFailed | dict[Name, Name | None]
    module_found: ProbeFailed | Presence
    program_found: ProbeFailed | Presence


class ContainerEngine(TypedDict):
    engine: bool
    failed: NotRequired[_Text]
    image: NotRequired[bool]
    gpus: NotRequired[bool | None]


class PortFound(TypedDict):
    free: bool
    reason: NotRequired[_Text | None]
    holder: NotRequired[_Text]
    room: NotRequired[bool]
    """Whether a launch can choose other ports."""


class Shared(TypedDict):
    path: Path
    missing: _Text
    """Why the machine does not see a file that the login node has written; empty if it does."""
    not_writable: NotRequired[_Text]


class Granted(TypedDict):
    """The GPUs that an engine gives the job on a machine."""

    count: Count
    devices: Annotated[tuple[Name, ...], Length(1024)]
    """As ``CUDA_VISIBLE_DEVICES`` names them; empty if nothing does."""


class GatheredFacts(TypedDict, total=False):
    """By probe."""

    machine: ProbeFailed | MachineFacts
    memory: ProbeFailed | MemoryFacts
    leftovers: ProbeFailed | dict[Name, tuple[Pid, ...]]
    storage: ProbeFailed | dict[Name, Folder]
    script: ProbeFailed | Script
    names: ProbeFailed | Names
    network: ProbeFailed | Network
    infiniband: ProbeFailed | dict[Name, InfinibandPort]
    gpus: FailedTool | Gpus
    interpreter: ProbeFailed | Interpreter
    container: ProbeFailed | ContainerEngine
    ports: ProbeFailed | dict[_Number, PortFound]
    shared: ProbeFailed | Shared
    granted: ProbeFailed | Granted


class Listening(TypedDict):
    port: Port


class Gathered(TypedDict):
    """The answer to ``gather``."""

    facts: GatheredFacts
    listening: ProbeFailed | Listening


class Clock(TypedDict):
    """The answer to ``clock``."""

    time: Time


class Dial(TypedDict):
    """The result of dialing one target."""

    host: Name
    kind: Literal["address", "interface", "port"]
    address: Name
    port: Port
    error: NotRequired[_Text]
    answered: NotRequired[Name]
    """The host that answered if ``error`` is ``wrong``; empty for another program than dtrain."""
    mss: NotRequired[Count]
    source: NotRequired[Address | None]


class Dialed(TypedDict):
    """The answer to ``dial``."""

    dialed: tuple[Dial, ...]


class Ran(TypedDict, total=False):
    """The answer to ``run``."""

    status: int | None
    said: Annotated[tuple[str, ...], Length(1024)]
    """The report of each rank, as JSON."""
    output: str
    error: _Text
    failed_setup: Annotated[int, Range(1, 1 << 20)]


_Rank = Annotated[int, Range(0, 10**6)]
_Bytes = Annotated[int, Range(1, 1 << 40)]


class RankFailed(TypedDict):
    """A rank or task that failed."""

    failed: Literal["import", "start", "store", "group", "server"]
    error: _Text


class RehearsalFailed(RankFailed, total=False):
    missing: tuple[_Rank, ...]
    pairs: tuple[tuple[_Rank, _Rank, _Text], ...]
    """First ranks of two hosts that cannot form a group, and the reason."""
    silent: tuple[tuple[Name, _Rank], ...]


class Rehearsed(TypedDict):
    """The report of one rank or task about a rehearsal."""

    failed: Literal[""]
    error: NotRequired[_Text]
    backend: NotRequired[Name]
    seconds: NotRequired[Seconds]
    silent: NotRequired[tuple[tuple[Name, _Rank], ...]]
    """Tasks that did not answer."""


_Rate = Annotated[float, Range(1e-9, 1e18)]


class ComputeMeasured(TypedDict):
    """What the device of a rank computes."""

    device: Name
    memory: Size
    """Bytes."""
    precision: dict[
        Literal["bfloat16", "float16", "tf32", "float32"],
        Annotated[tuple[tuple[Annotated[int, Range(1, 1 << 20)], _Rate], ...], Length(64)],
    ]
    """Sizes of square matrices, and the TFLOP/s of their product."""
    copy: _Rate
    """Bytes/s that a copy reads and writes."""
    attention: _Rate
    """TFLOP/s of the forward pass of causal attention."""


class RankMeasured(TypedDict):
    failed: Literal[""]
    backend: Name
    all: tuple[tuple[_Bytes, _Duration], ...]
    inside: tuple[tuple[_Bytes, _Duration], ...]
    pairs: tuple[tuple[_Rank, _Rank, _Bytes, _Duration], ...]
    compute: NotRequired[ComputeMeasured]


REHEARSED: Any = Rehearsed | RehearsalFailed
MEASURED: Any = RankMeasured | RankFailed


def read_gathered(
    answer: Mapping[str, Any], ports: Collection[int], setup: Sequence[str]
) -> Gathered:
    """The answer to ``gather`` about these ports, from a host with these setup lines.

    Raises ProtocolError.
    """
    found = decode(Gathered, answer, "gather")
    # Other hosts dial these ports, so accept only the requested ones.
    named = found["facts"].get("ports", {})
    if "error" not in named and (foreign := set(map(str, named)) - set(map(str, ports))):
        raise ProtocolError(f"facts.ports: port {min(foreign)} was not requested")
    interpreter: Mapping[str, Any] = found["facts"].get("interpreter", {})
    step = interpreter.get("failed_setup", 1)
    if step > max(1, len(setup)):
        raise ProtocolError(f"facts.interpreter: job.setup has no line {step}")
    return found


def read_dialed(answer: Mapping[str, Any], targets: Collection[DialTarget]) -> tuple[Dial, ...]:
    """The answer to ``dial``. Raises ProtocolError."""
    asked = {target[:4] for target in targets}
    dialed = decode(Dialed, answer, "dial")["dialed"]
    for one in dialed:
        if (one["host"], one["kind"], one["address"], one["port"]) not in asked:
            raise ProtocolError(f"dial: {excerpt(one['address'])} is not a requested target")
    return dialed


def read_ran(answer: Mapping[str, Any], kind: Any) -> tuple[Ran, tuple[dict[str, Any], ...]]:
    """The answer to ``run``, and the report of each rank, of type `REHEARSED` or `MEASURED`.

    Raises ProtocolError.
    """
    ran = decode(Ran, answer, "run")
    lines = enumerate(ran.get("said", ()))
    return ran, tuple(
        decode(kind, parse(line.encode(errors="replace")), f"said[{at}]") for at, line in lines
    )

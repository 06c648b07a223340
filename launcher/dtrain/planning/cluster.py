"""The cluster of a request: from options, else the cluster file, else 8 hosts of 8 A100s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, UsageError
from dtrain.parallelism.cluster.hardware import GpuCluster, slowest
from dtrain.parallelism.cluster.hardware_table import FORMAT, Hardware, hardware
from dtrain.parallelism.cluster.probe import Probe
from dtrain.planning.files import parsed
from dtrain.planning.request import LARGEST, AskQueue, PlanRequest
from dtrain.records import dataclass
from dtrain.wording import either

if TYPE_CHECKING:
    from dtrain.spec.model import ClusterFile, Host

USUAL_GPU, USUAL_HOSTS = "a100-80gb", 8


@dataclass(frozen=True, slots=True)
class Found:
    cluster: GpuCluster
    source: str
    """Where it comes from; empty if the request gives all of it."""
    notes: Sequence[str] = ()


def table_of(request: PlanRequest) -> Hardware:
    """Return dtrain's table of GPUs and machines, extended by the request's file."""
    if request.hardware is None:
        return hardware()
    return parsed(request.hardware, hardware().extended, FORMAT)


def cluster_of(
    request: PlanRequest,
    spec: ClusterFile | None,
    table: Hardware,
    ask: AskQueue | None,
    probe: Probe | None,
) -> Found:
    """Return the cluster of a request. Raises UsageError. For ``ask`` and ``probe`` see
    `dtrain.planning.question.pose`."""
    if spec is None:
        found = _of_options(request, table)
    else:
        of_file = _OfFile(request, spec, table, ask, probe)
        found = Found(of_file.cluster(), f"from {request.file}", of_file.notes)
    return replace(found, cluster=_in_racks(request, found.cluster))


def _of_options(request: PlanRequest, table: Hardware) -> Found:
    gpu = table.gpu(request.gpu or USUAL_GPU)
    gpus, per_host = request.gpus, request.gpus_per_host
    if gpus is None:
        gpus = USUAL_HOSTS * (per_host or table.machine(gpu.machine).gpus_per_host)
    cluster = table.cluster(gpu, gpus, gpus_per_host=per_host, network_gbps=request.network_gbps)
    options = {"gpus": f"{gpus}", "gpu": f"{gpu.name!r}"}
    if cluster.hosts > 1:
        options["gpus_per_host"] = f"{cluster.gpus_per_host}"
        options["network_gbps"] = f"{cluster.network * 8:g}"
    assumed = [name for name in options if getattr(request, name) is None]
    if not assumed:
        return Found(cluster, "")
    if len(assumed) == 4:  # the request gives none of them
        return Found(cluster, "assumed: give a cluster file, or `gpus` and `gpu`, for yours")
    return Found(cluster, "assumed: " + ", ".join(f"`{name}={options[name]}`" for name in assumed))


@dataclass(slots=True)
class _OfFile:
    """The cluster of a file, where options override it."""

    request: PlanRequest
    spec: ClusterFile
    table: Hardware
    ask: AskQueue | None
    probe: Probe | None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.request.file)

    @property
    def hosts(self) -> Sequence[Host]:
        return self.spec.cluster.hosts

    def cluster(self) -> GpuCluster:
        if self.probe is not None and self.probe.is_cpu:
            return self._of_cpus(self.probe)
        of_file = sorted({host.gpu for host in self.hosts if host.gpu is not None})
        queue = None
        named = self.request.gpu or of_file or self.probe
        if self.spec.cluster.allocated and self.ask is not None and not named:
            queue = self._of_queue(self.ask)
        per_host = self._per_host(queue)
        gpus = self.request.gpus
        if gpus is None:
            gpus = len(self.hosts) * per_host
        kinds = [queue[0]] if queue else self._kinds(of_file)
        # A GPU may have several names.
        gpus_by_name = {gpu.name: gpu for gpu in map(self.table.gpu, kinds)}
        if len(gpus_by_name) > 1:
            has = f"{self.name} has {either(gpus_by_name, 'and')}"
            if len({gpu.maker for gpu in gpus_by_name.values()}) > 1:
                raise UsageError(
                    f"{has}: those of different makers cannot communicate in one job",
                    hint="list only hosts with GPUs of one maker",
                )
            self.notes.append(
                f"{has}: planned with the speed of the slowest and the least memory, because each "
                "step waits for all of them"
            )
        self._note_overrides(of_file)
        gbps = self.request.network_gbps
        if gbps is None:
            gbps = self.spec.cluster.gbps
        cluster = self.table.cluster(
            slowest(gpus_by_name.values()), gpus, gpus_per_host=per_host or None, network_gbps=gbps
        )
        if gbps is None and cluster.hosts > 1:
            self.notes.append(
                f"{self.name} has no network.gbps: {cluster.network * 8:g} Gb/s is typical of "
                f"{cluster.gpu.name}"
            )
        return cluster

    def _per_host(self, queue: tuple[str, int] | None) -> int:
        """The GPUs of a host. 0: the request gives the GPUs of all hosts alone."""
        if self.request.gpus_per_host is not None:
            return self.request.gpus_per_host
        if queue and not self.hosts[0].gpus:
            return queue[1]
        counts = sorted({len(host.gpus) for host in self.hosts})
        if len(counts) > 1:
            raise UsageError(
                f"{self.name}: hosts have {either(map(str, counts), 'and')} GPUs,"
                " and a layout needs equal hosts",
                hint=f"list only equal hosts, or plan for `gpus_per_host={counts[0] or 1}`",
            )
        if not counts[0] and self.request.gpus is None:
            raise UsageError(
                f"{self.name}: its hosts have no GPUs, and layouts are planned for GPUs",
                hint="set cluster.gpus, use `gpus` and `gpus_per_host`, or add `probe` to measure "
                "the CPUs and plan for them",
            )
        return counts[0]

    def _kinds(self, of_file: Sequence[str]) -> Sequence[str]:
        """The names of the GPUs, without those of a queue."""
        if self.request.gpu:
            return [self.request.gpu]
        if not of_file and self.probe is not None:
            return [self.probe.device]
        unnamed = [host.name for host in self.hosts if host.gpu is None]
        if unnamed:
            which = hostlist.fold(unnamed) if of_file else "its hosts"
            raise UsageError(
                f"{self.name} does not name the GPU of {which}",
                hint=f"add 'gpu: {USUAL_GPU}' to cluster, or use `gpu={USUAL_GPU!r}`",
            )
        return of_file

    def _note_overrides(self, of_file: Sequence[str]) -> None:
        request = self.request
        for given, value, other in (
            ("gpu", request.gpu, " and ".join(of_file) or None),
            ("gpus", request.gpus, sum(len(host.gpus) for host in self.hosts)),
            ("network_gbps", request.network_gbps, self.spec.cluster.gbps),
        ):
            if value is not None and other is not None and value != other:
                self.notes.append(f"`{given}={value!r}` overrides {other} of {self.name}")

    def _of_cpus(self, probe: Probe) -> GpuCluster:
        """The measured CPUs as devices, one for each rank."""
        for name in ("gpu", "gpus", "gpus_per_host", "hardware", "price_per_gpu_hour"):
            if getattr(self.request, name) is not None:
                raise UsageError(
                    f"`{name}` is for GPUs, but the hosts have none: `probe` measured their CPUs",
                    hint="leave it out, or plan without `probe`",
                )
        gbps = self.request.network_gbps or (probe.network or probe.copy) * 8
        return self.table.cluster(
            probe.as_gpu(),
            len(self.hosts) * probe.per_host,
            gpus_per_host=probe.per_host,
            network_gbps=gbps,
        )

    def _of_queue(self, ask: AskQueue) -> tuple[str, int]:
        """The GPU's name in the table, and the number of GPUs of a machine, from the engine."""
        hint = f"add 'gpu: {USUAL_GPU}' to cluster, or use `gpu={USUAL_GPU!r}`"
        try:
            found = ask(self.spec)
        except DtrainError as error:
            raise UsageError(
                f"{self.name} does not name the GPU of its machines, and its cluster cannot be "
                f"asked: {error.message}",
                hint="\n".join(filter(None, (hint, error.hint))),
            ) from None
        where, without = found.where, f" ({found.left_out})" if found.left_out else ""
        if not found.per_host:
            raise UsageError(
                f"{where} has no machine with whole GPUs for the job{without},"
                " and layouts are planned for GPUs",
                hint="choose other machines in the file, or use `gpus` and `gpu`",
            )
        if not found.types:
            raise UsageError(
                f"{where} does not say which GPUs its machines have{without}", hint=hint
            )
        if len(found.types) > 1:
            raise UsageError(
                f"{where} has GPUs of {len(found.types)} types: {', '.join(found.types)}",
                hint=f"choose with cluster.{found.chosen_by}, or use `gpu={USUAL_GPU!r}`",
            )
        (kind,) = found.types
        try:
            gpu = self.table.gpu(kind).name
        except UsageError as error:
            raise UsageError(
                f"{where} has GPUs of type {kind!r}, which dtrain does not know",
                hint="\n".join(filter(None, (hint, error.hint))),
            ) from None
        self.notes.append(
            f"{where} has GPUs of type {kind}{without}, planned as {gpu}; cluster.gpu overrides"
            " this"
        )
        return gpu, found.per_host


def _in_racks(request: PlanRequest, cluster: GpuCluster) -> GpuCluster:
    """Return the cluster with the racks of the request."""
    hosts, gbps = request.rack_hosts, request.rack_gbps
    if hosts is None and gbps is None:
        return cluster
    if hosts is None or gbps is None:
        raise UsageError(
            "`rack_hosts` and `rack_gbps` describe the racks together",
            hint="give both: the hosts of one rack, and the Gb/s of one host to other racks",
        )
    if not 1 <= hosts <= LARGEST:
        raise UsageError(f"`rack_hosts={hosts}` is not a number of hosts", hint="at least 1")
    if not 0 < gbps < 1e9:
        raise UsageError(
            f"`rack_gbps={gbps:g}` is not a bandwidth",
            hint="Gb/s of one host to hosts of other racks, such as 400",
        )
    if hosts >= cluster.hosts:
        return cluster
    between = min(gbps / 8, cluster.network)
    return replace(cluster, rack_hosts=hosts, between_racks=between)

"""What is wrong with a cluster file's request to Slurm, before the job is submitted. Pure.

Slurm accepts many jobs that can never start: they wait in the queue. So the request is compared
with the partitions, and Slurm's own answer to `sbatch --test-only` covers the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from dtrain.checks.finding import Finding, Severity, error, warning
from dtrain.engines.slurm.login_shell import CommandAnswer
from dtrain.engines.slurm.partitions import Partition, SlurmMachine, chosen
from dtrain.engines.slurm.submission import POLICY, hint_for, is_unanswered
from dtrain.records import dataclass
from dtrain.spec.model import ClusterFile, Slurm
from dtrain.spec.problems import nearest
from dtrain.wording import counted, either

_FEATURE = re.compile(r"[A-Za-z0-9_.:+@-]+")
_GIVEN_PARTITION = re.compile(r"Job \d+ to start at .* in partition (\S+)$", re.MULTILINE)
_REFUSED = {
    "account": "slurm.account",
    "assoc": "slurm.account",
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "quality": "slurm.qos",
    "reservation": "slurm.reservation",
    "time limit": "slurm.time",
    "feature": "slurm.constraint",
    "option": "slurm.options",
    "memory": "slurm.options",
    "node count": "nodes",
    "node configuration": "slurm",
}
"""For a word in an error of sbatch: the key below `cluster` that the error is about."""


@dataclass(frozen=True, slots=True)
class RequestJudge:
    """Compares the request of one file with the partitions of one cluster."""

    spec: ClusterFile
    login: str
    """Name of the login node in findings."""
    place: Callable[[str], str]
    """The place of a key in the file."""

    def judge(self, partitions: Sequence[Partition], tested: CommandAnswer) -> list[Finding]:
        """All findings. ``tested`` is the answer to `sbatch --test-only`."""
        found = list(self._partitions(partitions, tested))
        if tested.status != 0 and not any(each.severity is Severity.ERROR for each in found):
            found.append(self.refusal(tested))
        return found

    def impossible(self, partitions: Sequence[Partition], tested: CommandAnswer) -> list[Finding]:
        """Limits above which a job waits, and of a refused job what the machines can give neither
        now nor later. Nothing about machines if a partition shows none: those of a cloud may be
        powered down."""
        possible = chosen(partitions, self._partition_names(tested))
        machines = tested.status != 0 and all(one.machines for one in possible)
        return _fewest_errors(
            [*self._limits(one), *(self._machines(one) if machines else ())] for one in possible
        )

    def free(self, partitions: Sequence[Partition], tested: CommandAnswer) -> bool:
        """Whether enough machines may be free now."""
        possible = chosen(partitions, self._partition_names(tested))
        nodes = len(self.spec.cluster.hosts)
        return any(sum(machine.free for machine in one.machines) >= nodes for one in possible)

    @property
    def _slurm(self) -> Slurm:
        return self.spec.cluster.slurm or Slurm()

    def _partition_names(self, tested: CommandAnswer) -> str | None:
        """The site, or a variable of the user, may choose the partition of a job without one."""
        given = _GIVEN_PARTITION.search(tested.err) if tested.status == 0 else None
        return self._slurm.partition or (given[1] if given is not None else None)

    def _error(self, key: str, seen: str, expected: str, remedy: str) -> Finding:
        where = self.place(f"cluster.{key}")
        return error(f"cluster.{key}", [self.login], seen, expected, remedy, where)

    def _warning(self, key: str, seen: str, expected: str, remedy: str) -> Finding:
        where = self.place(f"cluster.{key}")
        return warning(f"cluster.{key}", [self.login], seen, expected, remedy, where)

    def _partitions(
        self, partitions: Sequence[Partition], tested: CommandAnswer
    ) -> Iterator[Finding]:
        by_name = {one.name: one for one in partitions}
        shown = [one.name for one in partitions if not one.hidden]
        wanted = self._partition_names(tested)
        names = wanted.split(",") if wanted else ()
        possible = chosen(partitions, wanted)
        if not partitions:
            yield self._error(
                "slurm", "the cluster shows no partition", "at least one partition", "run `sinfo`"
            )
        elif not names and not possible:
            yield self._error(
                "slurm.partition",
                "the cluster has no default partition",
                "a partition for the job",
                f"set cluster.slurm.partition to {either(shown)}",
            )
        for name in names:
            if name not in by_name:
                close = nearest(name, shown)
                yield self._error(
                    "slurm.partition",
                    f"there is no partition {name}" + (f"; do you mean {close}?" if close else ""),
                    f"one of the cluster's partitions: {', '.join(shown)}",
                    f"set cluster.slurm.partition to {close or either(shown)}",
                )
        yield from _fewest_errors(list(self._partition(one)) for one in possible)

    def _partition(self, partition: Partition) -> Iterator[Finding]:
        if partition.state != "UP":
            yield self._error(
                "slurm.partition",
                f"partition {partition.name} is {partition.state}",
                "the partition is UP and starts jobs",
                "choose another partition (`sinfo`), or ask the administrator",
            )
        yield from self._limits(partition)
        yield from self._machines(partition)

    def _limits(self, partition: Partition) -> Iterator[Finding]:
        """Findings on time and size are only warnings: the QOS of the account, of the partition or
        of a variable may lift them, and sbatch refuses the job where the site wants that."""
        slurm, name = self._slurm, partition.name
        bound = slurm.qos is None  # the user has chosen one for that
        forever = "without a QOS that lifts the limit, the job waits forever"
        if bound and slurm.time and partition.max_time and slurm.time > partition.max_time:
            limit = duration(partition.max_time)
            yield self._warning(
                "slurm.time",
                f"{duration(slurm.time)} is more than the limit of partition {name}",
                f"at most {limit}: {forever}",
                f"set cluster.slurm.time to {limit} or less; with job.restart.max the job goes back"
                " to the queue at its time limit",
            )
        account, allowed = slurm.account, partition.allowed_accounts
        if account and allowed and account not in allowed:
            # Newer versions of Slurm also accept the accounts below those of the list.
            yield self._warning(
                "slurm.account",
                f"partition {name} does not list account {account}",
                f"one of {', '.join(allowed)}, or an account below one of them: otherwise the job"
                " waits forever",
                hint_for("account", self.login),
            )
        elif account and not allowed and account in partition.denied_accounts:
            yield self._error(
                "slurm.account",
                f"partition {name} does not accept jobs of account {account}",
                "an account that is not denied",
                hint_for("account", self.login),
            )
        nodes = len(self.spec.cluster.hosts)
        if bound and partition.max_nodes is not None and nodes > partition.max_nodes:
            yield self._warning(
                "nodes",
                f"{nodes} machines are more than a job in partition {name} may have",
                f"at most {partition.max_nodes}: {forever}",
                f"set cluster.nodes to {partition.max_nodes} or less",
            )

    def _machines(self, partition: Partition) -> Iterator[Finding]:
        """Machines that no key excludes, key by key: the first key that leaves too few is to
        blame."""
        nodes, name = len(self.spec.cluster.hosts), partition.name
        left = partition.machines
        if len(left) < nodes:
            yield self._error(
                "nodes",
                f"partition {name} has {counted(len(left), 'machine')}, and the job asks for"
                f" {nodes}",
                f"at most {len(left)}",
                f"set cluster.nodes to {len(left)} or less, or choose another partition",
            )
            return
        for key, fits, seen, remedy in self._needs(partition):
            before, left = left, tuple(machine for machine in left if fits(machine))
            if len(left) < nodes:
                yield self._error(
                    key,
                    f"{len(left)} of {counted(len(before), 'machine')} of partition {name} {seen}",
                    f"{nodes} such machines, as cluster.nodes says",
                    remedy,
                )
                return
        usable = [machine for machine in left if machine.usable]
        if len(usable) < nodes:
            states = sorted({machine.state for machine in left if not machine.usable})
            yield self._warning(
                "nodes",
                f"{len(usable)} of the {counted(len(left), 'machine')} that fit in partition"
                f" {name} can run jobs; the others are {', '.join(states)}",
                f"{nodes} of them can: the job waits until then",
                "`sinfo -R` shows why; set a smaller cluster.nodes, or choose another partition",
            )

    def _needs(
        self, partition: Partition
    ) -> Iterator[tuple[str, Callable[[SlurmMachine], bool], str, str]]:
        """Yield the requirements of the file on a machine: the key, a test of one machine, the
        requirement in words, and the remedy."""
        slurm, first = self._slurm, self.spec.cluster.hosts[0]
        gpus, kind = len(first.gpus), slurm.gpu_type
        if gpus and kind:
            has = [each for each in partition.gpu_types if each]
            yield (
                "slurm.gpu_type",
                lambda machine: machine.count(kind) > 0,
                f"have GPUs of type {kind}"
                + (f"; there are {', '.join(has)}" if has else "; the GPUs there have no type"),
                f"set cluster.slurm.gpu_type to {either(has)}" if has else "remove gpu_type",
            )
        if gpus:
            most = max((machine.count(kind) for machine in partition.machines), default=0)
            yield (
                "gpus",
                lambda machine: machine.count(kind) >= gpus,
                f"have {counted(gpus, 'GPU')}"
                + (f"; the most that one has is {most}" if most else ""),
                f"set cluster.gpus to {most} or less"
                if most
                else "choose a partition with GPUs (`sinfo -o '%P %G'`), or remove cluster.gpus",
            )
        cpus = (slurm.cpus or 1) * max(1, first.workers)
        size = max((machine.cpus for machine in partition.machines), default=0)
        wants = f"{counted(cpus, 'CPU')} for {counted(first.workers, 'process')}"
        yield (
            "slurm.cpus" if slurm.cpus else "gpus" if gpus else "slots",
            lambda machine: machine.cpus >= cpus,
            f"have {wants}; the most that one has is {size}",
            f"set cluster.slurm.cpus to {max(1, size // max(1, first.workers))} or less",
        )
        if slurm.constraint and _FEATURE.fullmatch(slurm.constraint):
            known = sorted({each for machine in partition.machines for each in machine.features})
            yield (
                "slurm.constraint",
                lambda machine: slurm.constraint in machine.features,
                f"have the feature {slurm.constraint}"
                + (f"; there are {', '.join(known)}" if known else "; no machine has a feature"),
                f"set cluster.slurm.constraint to {either(known)}"
                if known
                else "remove cluster.slurm.constraint",
            )

    def refusal(self, tested: CommandAnswer) -> Finding:
        """What sbatch says, at the key that it is about."""
        said = tested.words
        unasked = is_unanswered(said)
        key = "slurm"
        if not unasked:
            about = said.lower().replace(POLICY, "")
            key = next((key for word, key in _REFUSED.items() if word in about), "slurm")
            if key == "slurm" and self._slurm.options:
                key = "slurm.options"  # `judge` checks the other keys
        return self._error(
            key,
            said if unasked else f"sbatch refuses the job: {said}",
            "Slurm accepts the job",
            hint_for(said, self.login)
            or "`dtrain launch FILE --dry-run > job.sbatch` shows what dtrain asks for",
        )


def _fewest_errors(found: Iterable[list[Finding]]) -> list[Finding]:
    """The findings of the best partition: a job with several runs in the first that can take it."""
    return min(
        found,
        key=lambda one: (sum(each.severity is Severity.ERROR for each in one), len(one)),
        default=[],
    )


def duration(seconds: float) -> str:
    """``1d12h``, as in a cluster file."""
    minutes = int(seconds) // 60
    parts = ((minutes // 1440, "d"), (minutes % 1440 // 60, "h"), (minutes % 60, "m"))
    return "".join(f"{count}{unit}" for count, unit in parts if count) or f"{int(seconds)}s"

"""The state of a Slurm job, from ``scontrol show job --oneliner``. Pure."""

from __future__ import annotations

import re

from dtrain.hostlist import HostListError, unfold
from dtrain.messages.decode import ProtocolError, excerpt
from dtrain.records import dataclass
from dtrain.runs.shown_state import ShownState

FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")
"""A name and its value in the output of ``scontrol show --oneliner``."""
_UNKNOWN = ("", "(null)", "None", "Unknown", "N/A", "None assigned")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")

QUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
FINAL = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip

SUSPENDED = ("SUSPENDED", "STOPPED")
"""An urgent job may have its machines meanwhile."""

NO_OUTPUT = 53
"""What Slurm reports as a signal if it cannot open the output file of a script."""

REASONS = {
    "Resources": "waiting for free machines",
    "Priority": "jobs with a higher priority are first",
    "Dependency": "waiting for another job",
    "BeginTime": "waiting for its begin time",
    "JobHeldUser": "held; `scontrol release` lets it start",
    "JobHeldAdmin": "held by an administrator",
    "AccountNotAllowed": "the partition does not accept its account; cancel it, and set"
    " cluster.slurm.account",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the quality of service is not valid",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionConfig": "it asks for more than the partition allows",
    "PartitionNodeLimit": "it asks for more machines than the partition allows; cancel it, and set"
    " a smaller cluster.nodes",
    "PartitionTimeLimit": "it asks for more time than the partition allows; cancel it, and set a"
    " shorter cluster.slurm.time",
    "ReqNodeNotAvail": "machines that it needs are down or reserved",
    "Reservation": "waiting for its reservation",
    "Licenses": "waiting for a license",
}
"""What common reasons mean."""
_LIMIT = re.compile(r"(?P<whose>QOS|Assoc)(?P<kind>Grp|Max|Min)(?P<what>\w*)|Max\w+PerAccount")
"""A limit of a quality of service, or of an association of user and account. There are hundreds."""


@dataclass(frozen=True, slots=True)
class SlurmState:
    state: str
    """Slurm's word, such as ``PENDING``."""
    reason: str = ""
    start: str = ""
    """When the job started, or is expected to; empty if unknown."""
    hosts: tuple[str, ...] = ()
    """The allocated machines, in the order of their node ranks."""
    status: int = 0
    """Exit status of the job's script."""
    signal: int = 0
    """The signal that ended the script, or `NO_OUTPUT`."""
    restarts: int = 0
    time_limit: str = ""

    @property
    def queued(self) -> bool:
        return self.state in QUEUED

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def word(self) -> ShownState:
        """The state of each host of the job."""
        if self.queued:
            return ShownState.QUEUED
        if self.final:
            return ShownState.ENDED
        return {"CONFIGURING": ShownState.PREPARING, "COMPLETING": ShownState.STOPPING}.get(
            self.state, ShownState.RUNNING
        )

    @property
    def detail(self) -> str:
        """Why the job does not run now, as far as its state says it."""
        if self.state in SUSPENDED:
            return f"Slurm has {self.state.lower()} it"
        return self.explanation if self.queued else ""

    @property
    def explanation(self) -> str:
        """Why the job is queued, in words and as Slurm says it."""
        # Details follow: ``ReqNodeNotAvail,_UnavailableNodes:gpu01``.
        reason = self.reason.partition(",")[0]
        words = REASONS.get(reason) or _limit(reason)
        said = self.reason.replace("_", " ")
        return f"{words} ({said})" if words else said


def _limit(reason: str) -> str:
    """What a limit means for a queued job; empty if it is not one."""
    limit = _LIMIT.match(reason)
    if limit is None:
        return ""
    kind, what = limit["kind"], limit["what"] or ""
    whose = "its account" if limit["whose"] == "Assoc" else "its quality of service"
    if kind == "Min":
        return f"it asks for less than {whose} requires; cancel it, and ask for more"
    if kind == "Max" and ("PerJob" in what or "PerNode" in what):
        return f"it asks for more than {whose} allows; cancel it, and ask for less"
    if kind == "Grp" and ("Wall" in what or ("Minutes" in what and "Run" not in what)):
        return f"{whose} has too little time left for it"
    # Slurm gives one reason for both.
    return f"other jobs use what {whose} allows, or it asks for more than that"


def parse(text: str) -> SlurmState:
    """Raises ProtocolError for text that ``scontrol`` does not print."""
    fields: dict[str, str] = {}
    for name, value in FIELD.findall(text):
        # Later fields, such as the command, hold text of users.
        fields.setdefault(name, "" if value in _UNKNOWN else value)
    if "JobState" not in fields:
        raise ProtocolError(f"job: no state in {excerpt(text)}")
    try:
        nodes = fields.get("NodeList", "")
        status, _, signal = fields.get("ExitCode", "").partition(":")
        return SlurmState(
            state=fields["JobState"],
            reason=fields.get("Reason", ""),
            start=" ".join(_TIME.findall(fields.get("StartTime", ""))).replace("T", " "),
            hosts=unfold(nodes) if nodes else (),
            status=int(status or 0),
            signal=int(signal or 0),
            restarts=int(fields.get("Restarts", "") or 0),
            time_limit=fields.get("TimeLimit", ""),
        )
    except (HostListError, ValueError) as error:
        raise ProtocolError(f"job: {error}") from None

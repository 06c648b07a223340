"""The limit of open files: each output of a worker is one, in the supervisor and in every relay."""

from __future__ import annotations

import contextlib
import resource

from dtrain.node.agent.wire import RefusedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.commands import SupervisorRequest

    Limits = tuple[int, int]
    """The soft and the hard limit."""

OWN = 24
"""Open files of a supervisor or relay, beside the outputs and ports of the job."""


ENOUGH = 1 << 16
"""The soft limit that we want. Some programs that we start look at each file up to theirs, and hard
limits of a billion are common in containers."""


def raise_limit() -> Limits:
    """Raise our soft limit, which is low on some hosts. Returns the limits of the job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft, hard


def require_files(request: SupervisorRequest) -> None:
    """Raises RefusedError if our limit is too low for the job: a relay would lose output."""
    ranks = sum(body["ranks"] for body in request["processes"] if body["role"] == "torchrun")
    wanted = OWN + 2 * (len(request["processes"]) + ranks + len(request["ports"]))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and most < wanted:
        raise RefusedError(
            "agent",
            "a process may open %d files on this host, but this job needs %d" % (most, wanted),
            "raise the hard limit of open files there: `ulimit -Hn`, nofile in"
            " /etc/security/limits.conf",
        )

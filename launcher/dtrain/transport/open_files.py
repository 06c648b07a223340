"""The limit of open files of this process."""

from __future__ import annotations

import contextlib
import resource

from dtrain.diagnostics import LimitError

_EACH = 4
"""Open files for each host: its connection, and others for a moment."""
_OWN = 256
_LEAST = 31
"""Open files besides a connection to each host. With fewer, a launch fails somewhere in the middle,
and `dtrain attach` would stop the job because it cannot store its output."""


def allow_files(hosts: int) -> None:
    """Raise the soft limit, which is 1,024 on most systems, for connections to ``hosts``.

    Raises LimitError if the hard limit is too low for them.
    """
    wanted = hosts * _EACH + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        if hard < (least := hosts + _LEAST):
            raise LimitError(
                f"this machine lets dtrain open {hard} files, but it needs at least {least}",
                hint=f"raise the limit of open files: `ulimit -n {wanted}`",
            )
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

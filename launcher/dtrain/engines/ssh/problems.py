"""Converts problems on a host into errors for the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dtrain.diagnostics import ConnectError, PortBusyError, PrepareError
from dtrain.messages import agent as messages


def refused(host: str, attempted: str, message: messages.Refused) -> PrepareError:
    kind = PortBusyError if message.what == "port" else PrepareError
    return kind(host, attempted, message.reason, hint=message.hint)


def supervisor_died(host: str, message: messages.Lost) -> PrepareError:
    if message.survivors:
        return _survived(host, message.survivors, message.reason)
    hint = (
        "something on that host, such as an out-of-memory killer, killed dtrain's own process: "
        "search `dmesg` and `journalctl` there; its workers were killed too"
    )
    return PrepareError(host, "running the job", message.reason, hint=message.hint or hint)


def ended_badly(host: str, event: messages.Ended) -> PrepareError | None:
    """None if the job left no survivors and the supervisor reported no error."""
    reason = f"the supervisor on the host failed: {event.error}" if event.error else ""
    if event.survivors:
        return _survived(host, event.survivors, reason)
    return PrepareError(host, "running the job", reason) if reason else None


def _survived(host: str, survivors: Iterable[messages.Survivor], cause: str) -> PrepareError:
    names = ", ".join(f"{each.name} (pid {each.pid})" for each in survivors)
    hint = "a process in uninterruptible sleep ends when its driver or disk answers"
    if cause:
        reason = f"{cause}\nprocesses survive KILL: {names}"
        return PrepareError(host, "running the job", reason, hint=hint)
    return PrepareError(
        host, "ending the job's processes", f"they survive KILL: {names}", hint=hint
    )


def cut_off(host: str, seconds: float) -> ConnectError:
    """The host was unreachable for ``seconds`` and is given up."""
    return ConnectError(host, "following the job", f"cut off for {seconds:g} s")

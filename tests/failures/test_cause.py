"""Whose fault it was."""

from __future__ import annotations

from dataclasses import replace

from dtrain.diagnostics import NodeError
from dtrain.failures.alike import hints, messages
from dtrain.failures.cause import Failure, in_order_of_blame
from dtrain.failures.kernel import KernelMessage
from dtrain.spec.model import Host


def failure(rank: int, time: float, **what: object) -> Failure:
    fields = {"code": 1} | what
    return Failure(host=f"n{rank}", role="worker", index=rank, rank=rank, time=time, **fields)  # type: ignore[arg-type]


def ranks(*failures: Failure) -> list[int | None]:
    return [each.rank for each in in_order_of_blame(failures)]


def test_the_earliest_comes_first() -> None:
    assert ranks(failure(1, 2.0), failure(0, 1.0)) == [0, 1]


def test_an_echo_comes_after_its_cause_even_if_it_was_heard_first() -> None:
    echo = failure(0, 1.0, message="RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1")
    assert ranks(echo, failure(1, 1.5, message="ValueError: bad batch")) == [1, 0]


def test_a_worker_told_to_end_comes_before_echoes_and_after_faults() -> None:
    echo = failure(0, 1.0, traceback="NCCL error: remote process exited or there was a network")
    stopped = failure(1, 1.1, code=None, signal="SIGTERM")
    fault = failure(2, 1.2, code=7)
    assert ranks(echo, stopped, fault) == [2, 1, 0]


def test_a_killed_worker_is_a_cause_whatever_it_said_before() -> None:
    killed = failure(3, 2.0, code=None, signal="SIGKILL", traceback="Connection reset by peer")
    echo = failure(0, 1.0, message="Connection closed by peer")
    assert ranks(echo, killed) == [3, 0]


def test_at_one_moment_who_was_killed_comes_before_who_says_something() -> None:
    """Clocks of two hosts agree within milliseconds at best, and peers notice a death as fast."""
    noticed = failure(0, 1.0, message="RuntimeError: something went wrong")
    silent = failure(1, 1.01)
    killed = failure(2, 1.02, code=None, signal="SIGKILL")
    assert ranks(noticed, silent, killed) == [2, 0, 1]
    assert ranks(silent, noticed) == [0, 1]
    late = failure(2, 1.5, code=None, signal="SIGKILL")
    assert ranks(noticed, late) == [0, 2]


def test_one_host_knows_who_failed_first_there() -> None:
    first = failure(0, 1.0)
    killed = replace(failure(1, 1.001, code=None, signal="SIGKILL"), host="n0")
    assert ranks(killed, first) == [0, 1]


def test_a_status_that_tells_of_a_signal() -> None:
    """As shells and containers give it."""
    assert failure(0, 0.0, code=137).ended_by == "SIGKILL"
    assert failure(0, 0.0, code=200).ended_by is None
    stopped = failure(0, 1.0, code=143)
    assert ranks(stopped, failure(1, 2.0)) == [1, 0]
    assert "something on that host killed it" in failure(0, 0.0, code=137).hint


def test_a_host_at_fault() -> None:
    said = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert failure(0, 0.0, message=said).host_at_fault
    assert not failure(0, 0.0, message="ValueError: bad batch").host_at_fault


def test_a_hint_says_what_happened_and_what_to_do() -> None:
    what, remedy = failure(0, 0.0, message="OSError: [Errno 24] Too many open files").hint.split(
        "\n"
    )
    assert what == "the process reached its limit of open files"
    assert "ulimit -n" in remedy
    assert failure(0, 0.0, message="ValueError: bad batch").hint == ""


def test_a_process_that_ends_in_silence_has_a_hint() -> None:
    assert failure(0, 0.0).hint.startswith("it wrote nothing to stderr")
    assert not failure(0, 0.0, code=None, signal="SIGUSR1").hint.startswith("it wrote nothing")


def test_memory_that_ran_out_elsewhere_did_not_kill_who_exited() -> None:
    """The kernel's counter is the host's: the flag says only that something was killed there."""
    assert failure(0, 0.0, out_of_memory=True).how == "exited with status 1"


def test_words() -> None:
    assert failure(3, 0.0).who == "rank 3 on n3"
    assert failure(3, 0.0).how == "exited with status 1"
    assert failure(3, 0.0, code=None, signal="SIGSEGV").how == "was killed by SIGSEGV"
    ps = Failure("n0", "ps", 1, None, 0.0, signal="SIGKILL", out_of_memory=True)
    assert f"{ps.who} {ps.how}" == "ps1 on n0 was killed: out of memory"


OFF_THE_BUS = KernelMessage(
    "xid-79",
    "NVRM: Xid …",
    "GPU 3 fell off the bus (Xid 79)",
    "reboot the host",
    0.0,
    host=True,
    gpu=3,
)


def test_what_the_kernel_says_of_a_host_explains_what_looks_like_an_echo() -> None:
    said = "RuntimeError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(...)"
    echo = failure(1, 1.0, message=said)
    lost = failure(2, 1.5, message=said, kernel=OFF_THE_BUS)
    assert ranks(echo, lost) == [2, 1]
    assert lost.host_at_fault and not echo.host_at_fault
    assert lost.hint == "GPU 3 fell off the bus (Xid 79)\nreboot the host"


def test_whom_the_kernel_killed() -> None:
    oom_kill = KernelMessage(
        "out-of-memory-killer", "Out of memory: …", "memory was full", "less", 0.0
    )
    killed = failure(3, 0.0, code=None, signal="SIGKILL", kernel=oom_kill)
    assert f"{killed.who} {killed.how}" == (
        "rank 3 on n3 was killed by the kernel's out-of-memory killer"
    )
    assert killed.hint == "memory was full\nless"


def test_a_weak_hint_of_the_kernels_comes_after_what_the_process_said() -> None:
    weak = replace(OFF_THE_BUS, id="xid-31", what="it faulted", host=False, weak=True)
    said = "RuntimeError: CUDA error: device-side assert triggered"
    assert "a check inside a CUDA kernel" in failure(0, 0.0, message=said, kernel=weak).hint
    assert failure(0, 0.0, kernel=weak).hint.startswith("it faulted")


def test_hosts_with_different_messages_share_a_hint() -> None:
    hosts = [Host(name, f"10.0.0.{place}") for place, name in enumerate(("a", "b", "c"), 1)]
    problems = [
        NodeError(host.name, "connecting", f"unknown key {place}", hint=f"run `ssh {host.address}`")
        for place, host in enumerate(hosts)
    ]
    assert messages(problems, hosts) == [
        "a: connecting: unknown key 0",
        "b: connecting: unknown key 1",
        "c: connecting: unknown key 2",
    ]
    assert hints(problems, hosts) == ["run `ssh 10.0.0.1` (shown for a; same on the others)"]


def test_a_hint_without_a_host_is_given_once() -> None:
    problems = [NodeError(host, "connecting", host * 2, hint="check the VPN") for host in "ab"]
    assert hints([*problems, NodeError("c", "reading", "lost")], []) == ["check the VPN"]

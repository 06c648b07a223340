"""Measures the speed of the network: one rank of `dtrain check --bandwidth`.

`dtrain.node.ranks` starts it for every rank of the job. The ranks

1. all-reduce buffers of several sizes over all ranks, and over the ranks of each host;
2. send buffers from host to host: the first ranks of all hosts meet in pairs, in the rounds of a
   tournament, so that no two pairs share a host's link;
3. with the option ``compute`` (`dtrain plan --probe`), measure what their devices compute.
"""

from __future__ import annotations

import marshal
import os
import time
from datetime import timedelta
from importlib import import_module

from dtrain.node.compute_speed import measure_compute
from dtrain.node.ranks import finish, first_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable

    from dtrain.node.importer import Importer

    Json = dict[str, Any]

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Bytes on each rank."""
PAIR_SIZES = (1 << 20, 16 << 20)
LONG = 0.3
"""Seconds of one measurement, after two warm-up rounds."""
MOST = 20
TRIES = 4
LIMIT = 120.0


def measure(options: Json) -> Json:
    report: Json = {"rank": int(os.environ["RANK"]), "failed": "import"}
    try:
        torch, dist = import_module("torch"), import_module("torch.distributed")
        gpu = torch.cuda.is_available()
        device = "cpu"
        if gpu:
            device = "cuda:" + os.environ["LOCAL_RANK"]
            torch.cuda.set_device(device)
        report["failed"] = "group"
        backend = "nccl" if gpu else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT))
        fabric = Fabric(torch, dist, device)
        report["backend"] = backend
        report["all"] = [[size, fabric.all_reduce(size, None)] for size in SIZES]
        own = None
        for ranks in options["hosts"]:
            group = dist.new_group(ranks)
            if report["rank"] in ranks and len(ranks) > 1:
                own = group
        dist.barrier()
        report["inside"] = [[size, fabric.all_reduce(size, own)] for size in SIZES] if own else []
        dist.barrier()
        report["pairs"] = fabric.tournament(options["rounds"])
        if options.get("compute"):
            dist.barrier()
            report["compute"] = measure_compute(torch, device)
            dist.barrier()
        report["failed"] = ""
    except BaseException as failure:  # noqa: BLE001 - reported to the launcher
        report["error"] = first_line(failure)
    return report


class Fabric:
    def __init__(self, torch: Any, dist: Any, device: str) -> None:
        self._torch, self._dist, self._device = torch, dist, device
        self._rank = dist.get_rank()

    def all_reduce(self, size: int, group: Any) -> float:
        """Seconds of one all-reduce of ``size`` bytes in 32-bit numbers."""
        buffer = self._numbers(size)
        return self._seconds(lambda: self._dist.all_reduce(buffer, group=group), group)

    def tournament(self, rounds: list[list[list[int]]]) -> list[list[Any]]:
        """``[from, to, bytes, seconds]`` in both directions, for each pair of which this rank is
        the first."""
        found: list[list[Any]] = []
        for pairs in rounds:
            self._dist.barrier()
            for pair in pairs:
                first, second = pair
                for size in PAIR_SIZES:
                    if self._rank == first:
                        found.append([first, second, size, self._time(second, size, 1)])
                        found.append([second, first, size, self._time(second, 1, size)])
                    elif self._rank == second:
                        self._answer(first, size, 1)
                        self._answer(first, 1, size)
        self._dist.barrier()
        return found

    def _time(self, other: int, there: int, back: int) -> float:
        """Seconds to send ``there`` bytes and receive ``back`` bytes: the fastest try."""
        times = []
        out, into = self._numbers(there), self._numbers(back)
        for _ in range(TRIES):
            begun = time.monotonic()
            self._dist.send(out, other)
            self._dist.recv(into, other)
            self._wait()
            times.append(time.monotonic() - begun)
        return min(times)

    def _answer(self, other: int, there: int, back: int) -> None:
        out, into = self._numbers(back), self._numbers(there)
        for _ in range(TRIES):
            self._dist.recv(into, other)
            self._dist.send(out, other)

    def _numbers(self, size: int) -> Any:
        """A tensor of ``size`` bytes, with at least one number."""
        return self._torch.zeros(max(1, size // 4), device=self._device)

    def _seconds(self, act: Callable[[], Any], group: Any) -> float:
        """Seconds of one ``act``. All ranks of the group act together, so they agree on the number
        of repetitions."""
        for _ in range(2):
            act()
        self._wait()
        begun = time.monotonic()
        act()
        self._wait()
        once = self._torch.tensor([time.monotonic() - begun], device=self._device)
        self._dist.all_reduce(once, op=self._dist.ReduceOp.MAX, group=group)
        count = min(MOST, int(LONG / max(once.item(), 1e-6)))
        if count <= 1:
            return float(once.item())
        self._wait()
        begun = time.monotonic()
        for _ in range(count):
            act()
        self._wait()
        return (time.monotonic() - begun) / count

    def _wait(self) -> None:
        if self._device != "cpu":
            self._torch.cuda.synchronize()


def main(stream: BinaryIO, importer: Importer) -> None:
    finish(measure(marshal.load(stream)))

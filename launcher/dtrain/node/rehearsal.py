"""Starts and ends a real process group: one rank of `dtrain check --rendezvous`.

`dtrain.node.ranks` starts it for every rank of the job. Each rank

1. connects to the store of rank 0;
2. forms the process group of all ranks and all-reduces a one;
3. if that fails, forms a group of two with every other host, in the rounds of a tournament. This
   shows which pairs of hosts cannot connect.
"""

from __future__ import annotations

import json
import marshal
import os
import threading
import time
from datetime import timedelta
from importlib import import_module

from dtrain.node.ranks import finish, first_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable, Sequence

    from dtrain.node.importer import Importer

    Json = dict[str, Any]
    Rounds = list[list[list[int]]]

STORE = 60.0
"""Seconds that the ranks' starts may differ: importing torch from a cold disk is slow."""
GROUP = float(os.environ.get("DTRAIN_START_TIMEOUT") or 0) or 20.0
"""Seconds for the group of all ranks. TensorFlow's workers read the same variable."""
PAIR = 6.0
"""Seconds for a group of two."""


def within(limit: float, action: Callable[[], None]) -> None:
    """Do ``action`` in a thread, because gloo tries to connect long after its own timeout. Raises
    the errors of ``action``, and TimeoutError after ``limit`` seconds."""
    raised: list[BaseException | None] = []

    def act() -> None:
        try:
            action()
            raised.append(None)
        except BaseException as failure:  # noqa: BLE001 - raised again in the waiting thread
            raised.append(failure)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(limit)
    if not raised:
        raise TimeoutError("no answer within %g s" % limit)
    if raised[0] is not None:
        raise raised[0]


def rehearse(rounds: Rounds) -> Json:
    """The report: which step failed, and for which ranks. ``rounds`` contain pairs of hosts, as
    their first ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report: Json = {"rank": rank, "failed": "import"}
    begun = time.monotonic()
    present: list[int] = []
    try:
        torch, dist = import_module("torch"), import_module("torch.distributed")
        report["failed"] = "store"
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            rank == 0,
            timedelta(seconds=STORE),
            wait_for_workers=False,
        )
        report["failed"] = "group"
        device = "cpu"
        if torch.cuda.is_available():
            local = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(local)
            device = "cuda:%d" % local
        backend = "gloo" if device == "cpu" else "nccl"
        present = meet(store, "start", rank, range(size), STORE)
        report["missing"] = sorted(set(range(size)) - set(present))
        if report["missing"]:
            raise RuntimeError("%d of %d ranks never came" % (len(report["missing"]), size))

        def sum_up() -> None:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("all", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=GROUP),
            )
            ones = torch.ones(1, device=device)
            dist.all_reduce(ones)
            if ones.item() != size:
                raise RuntimeError("the sum of %d ones came out as %g" % (size, ones.item()))

        within(GROUP, sum_up)
        report.update(failed="", backend=backend)
    except BaseException as failure:  # noqa: BLE001 - reported to the launcher
        report["error"] = first_line(failure)
    report["seconds"] = round(time.monotonic() - begun, 3)
    try:
        if report["failed"] == "group":
            present = meet(store, "failed", rank, present, STORE)
            report["pairs"] = tournament(store, rank, rounds, present)
        if report["failed"] in ("", "group"):
            meet(store, "end", rank, present, GROUP)
    except BaseException as failure:  # noqa: BLE001 - the report so far still counts
        report.setdefault("error", first_line(failure))
    return report


def meet(store: Any, name: str, rank: int, ranks: Sequence[int], limit: float) -> list[int]:
    """Wait up to ``limit`` seconds for all ``ranks``. Returns those that arrived in time for rank
    0, which has the store and is one of ``ranks``."""
    store.set("%s/%d" % (name, rank), "here")
    if rank == 0:
        deadline = time.monotonic() + limit
        came: list[int] = []
        while len(came) < len(ranks) and time.monotonic() < deadline:
            came = [one for one in ranks if store.check(["%s/%d" % (name, one)])]
            time.sleep(0.02)
        store.set(name, json.dumps(came))
    store.wait([name], timedelta(seconds=limit + 10))
    found: list[int] = json.loads(store.get(name))
    return found


def tournament(store: Any, rank: int, rounds: Rounds, present: list[int]) -> list[list[Any]]:
    """The pairs with this host that cannot connect, each with the reason.

    All ranks in ``present`` wait for each other before each round. Otherwise a host delayed by an
    unreachable peer would miss its next pair.
    """
    torch, dist = import_module("torch"), import_module("torch.distributed")
    failed: list[list[Any]] = []
    for number, pairs in enumerate(rounds):
        meet(store, "round %d" % number, rank, present, 4 * PAIR)
        for pair in pairs:
            if rank not in pair or not set(pair) <= set(present):
                continue

            def sum_up(
                name: str = "pair/%d-%d" % tuple(pair), place: int = pair.index(rank)
            ) -> None:
                prefix = dist.PrefixStore(name, store)
                group = dist.ProcessGroupGloo(prefix, place, 2, timedelta(seconds=PAIR))
                group.allreduce([torch.ones(1)]).wait()

            try:
                within(PAIR, sum_up)
            except BaseException as failure:  # noqa: BLE001 - reported to the launcher
                failed.append([*pair, first_line(failure)])
    return failed


def main(stream: BinaryIO, importer: Importer) -> None:
    options = marshal.load(stream)
    finish(rehearse(options["rounds"]))

"""Collects all facts in parallel, each with a time limit."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

from dtrain.node.facts.code import script
from dtrain.node.facts.containers import containers
from dtrain.node.facts.gpus import gpus
from dtrain.node.facts.job import interpreter
from dtrain.node.facts.job_copy import JobCopy, starts_like_us
from dtrain.node.facts.machine import leftovers, machine, memory
from dtrain.node.facts.network import infiniband, names, network
from dtrain.node.facts.ports import Listener, ports
from dtrain.node.facts.probing import LIMIT, guarded
from dtrain.node.facts.storage import storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder
    from dtrain.node.facts.socket_loop import SocketLoop

PROBES: dict[str, Callable[[GatherOrder], Json]] = {
    "machine": machine,
    "memory": memory,
    "leftovers": leftovers,
    "storage": storage,
    "script": script,
    "names": names,
    "network": network,
    "infiniband": infiniband,
    "gpus": gpus,
    "interpreter": interpreter,
    "container": containers,
}


def gather(request: GatherOrder, loop: SocketLoop) -> Json:
    """All requested facts. Ports come first, because they stay open for other hosts to dial, until
    the loop is closed."""
    probes = dict(PROBES)
    if "interpreter" in request["probes"] and request["interpreter"].get("copy"):
        with contextlib.suppress(OSError):
            if starts_like_us(request):
                probes["interpreter"] = partial(interpreter, copy=JobCopy(request))
    listener = Listener(request["host"], request["token"], loop)
    facts: Json = {"ports": guarded(lambda: ports(request, listener))}
    limits = dict.fromkeys(request["probes"], LIMIT)
    if "gpus" in limits:
        limits["gpus"] = 45.0
    if "interpreter" in limits:
        limits["interpreter"] = request["interpreter"]["limit"] + 5.0
    is_set_up = threading.Event()
    if "script" in limits and "interpreter" in limits and request["setup"]:
        limits["script"] += limits["interpreter"]
    else:
        is_set_up.set()

    def work(name: str) -> None:
        if name == "script":
            is_set_up.wait()  # the setup lines may create it
        facts.setdefault(name, guarded(lambda: probes[name](request)))
        if name == "interpreter":
            is_set_up.set()

    threads = {name: threading.Thread(target=work, args=(name,), daemon=True) for name in limits}
    for thread in threads.values():
        thread.start()
    begun = time.monotonic()
    for name, limit in sorted(limits.items(), key=lambda one: one[1]):
        threads[name].join(max(0.0, begun + limit - time.monotonic()))
        facts.setdefault(name, {"error": "no answer within %g s" % limit})
    listening = guarded(lambda: {"port": listener.open(0)})
    return {"facts": facts, "listening": listening}

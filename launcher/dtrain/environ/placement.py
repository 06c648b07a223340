"""TensorFlow: which task runs on which host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from dtrain.environ.devices import split


def place_tasks(roles: Mapping[str, int], gpus: Sequence[int]) -> list[tuple[str, int, int]]:
    """Place every task of ``roles`` on one of the hosts, which have so many ``gpus`` each.

    Returns ``(role, index, host)`` in the order chief, worker, ps, evaluator. Tasks that train
    go round the hosts from the first on, where the GPUs are: each goes to the host that leaves
    it the most of them (the highest averages of D'Hondt). A chief trains too, unless there are
    parameter servers; then it only coordinates, from the first host. Parameter servers go round
    from the last host back, so that they meet as few of the coordinator and workers as possible,
    and keep to hosts without GPUs where there are some. The evaluator takes the host with the
    fewest tasks.
    """
    everyone = range(len(gpus))
    shares = [count if any(gpus) else 1 for count in gpus]
    waiting: list[tuple[float, int, int]] = [
        (-share, 0, host) for host, share in enumerate(shares) if share
    ]
    heapify(waiting)
    placed: list[tuple[str, int, int]] = []

    def train(role: str, index: int) -> None:
        _, tasks, host = waiting[0]
        heapreplace(waiting, (-shares[host] / (tasks + 2), tasks + 1, host))
        placed.append((role, index, host))

    for index in range(roles.get("chief", 0)):
        if trains("chief", roles):
            train("chief", index)
        else:
            placed.append(("chief", index, 0))
    for index in range(roles.get("worker", 0)):
        train("worker", index)
    serving = [host for host in everyone if any(gpus) and not gpus[host]] or [*everyone]
    placed += [
        ("ps", index, serving[-1 - index % len(serving)]) for index in range(roles.get("ps", 0))
    ]
    for index in range(roles.get("evaluator", 0)):
        load = [sum(host == other for _, _, other in placed) for host in everyone]
        placed.append(("evaluator", index, min(everyone, key=lambda h: (load[h], -h))))
    return placed


def gpus_of_trainers(roles: Mapping[str, int], gpus: Sequence[int]) -> list[int]:
    """How many GPUs each task that trains has, where a host's are shared evenly."""
    placed = place_tasks(roles, gpus)
    tasks = Counter(host for role, _, host in placed if trains(role, roles))
    return [len(own) for host in tasks for own in split(range(gpus[host]), tasks[host])]


def trains(role: str, roles: Mapping[str, int]) -> bool:
    """Whether a task of ``role`` computes gradients, and so wants GPUs."""
    return role == "worker" or (role == "chief" and not roles.get("ps", 0))


def is_service(role: str, roles: Mapping[str, int]) -> bool:
    """Whether a task serves the others for ever, and is stopped once they are done."""
    return role in ("ps", "evaluator") or (role == "worker" and bool(roles.get("ps", 0)))

"""TensorFlow: the host of each task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import cycle

from dtrain.environ.devices import split


def place_tasks(roles: Mapping[str, int], gpus: Sequence[int]) -> list[tuple[str, int, int]]:
    """Place every task of ``roles`` on one of the hosts; ``gpus`` is the number of GPUs of each.

    Returns ``(role, index, host)`` in the order chief, worker, ps, evaluator.

    - Tasks that train go to the host with the most GPUs per task (D'Hondt's highest averages).
      When every GPU has a task, they go to the hosts without GPUs, in turn.
    - A chief trains too, unless there are parameter servers; then it only coordinates, on the
      first host.
    - Parameter servers go to hosts without GPUs if there are any, else to all hosts, in turn and
      from the last host, so that they rarely share a host with the coordinator and the workers.
    - The evaluator goes to the host with the fewest tasks.
    """
    everyone = range(len(gpus))
    without = [host for host in everyone if not gpus[host]] or [*everyone]
    waiting = [(-float(gpus[host]), 0, host) for host in everyone if gpus[host]]
    heapify(waiting)
    go_round = cycle(without)
    placed: list[tuple[str, int, int]] = []

    def train(role: str, index: int) -> None:
        if not waiting:
            placed.append((role, index, next(go_round)))
            return
        _, tasks, host = heappop(waiting)
        if tasks + 1 < gpus[host]:
            heappush(waiting, (-gpus[host] / (tasks + 2), tasks + 1, host))
        placed.append((role, index, host))

    for index in range(roles.get("chief", 0)):
        if trains("chief", roles):
            train("chief", index)
        else:
            placed.append(("chief", index, 0))
    for index in range(roles.get("worker", 0)):
        train("worker", index)
    placed += [
        ("ps", index, without[-1 - index % len(without)]) for index in range(roles.get("ps", 0))
    ]
    for index in range(roles.get("evaluator", 0)):
        load = [sum(host == other for _, _, other in placed) for host in everyone]
        placed.append(("evaluator", index, min(everyone, key=lambda h: (load[h], -h))))
    return placed


def gpus_of_trainers(roles: Mapping[str, int], gpus: Sequence[int]) -> list[int]:
    """The number of GPUs of each task that trains. Tasks on a host share its GPUs evenly."""
    placed = place_tasks(roles, gpus)
    tasks = Counter(host for role, _, host in placed if trains(role, roles))
    return [len(own) for host in tasks for own in split(range(gpus[host]), tasks[host])]


def trains(role: str, roles: Mapping[str, int]) -> bool:
    """Whether a task of ``role`` computes gradients, and so needs GPUs."""
    return role == "worker" or (role == "chief" and not roles.get("ps", 0))


def is_service(role: str, roles: Mapping[str, int]) -> bool:
    """Whether a task serves other tasks until they finish, and dtrain then stops it."""
    return role in ("ps", "evaluator") or (role == "worker" and bool(roles.get("ps", 0)))

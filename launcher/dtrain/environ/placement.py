"""TensorFlow: which task runs on which host."""

from __future__ import annotations

from collections.abc import Mapping


def place_tasks(roles: Mapping[str, int], hosts: int) -> list[tuple[str, int, int]]:
    """Place every task of ``roles`` on one of ``hosts`` hosts.

    Returns ``(role, index, host)`` in the order chief, worker, ps, evaluator. Tasks that train
    go round the hosts from the first on; a chief trains too, unless there are parameter servers
    (then it only coordinates). Parameter servers go round from the last host back, so that they
    meet as few of the coordinator and workers as possible. The evaluator takes the host with the
    fewest tasks.
    """
    placed: list[tuple[str, int, int]] = []
    chief_trains = not roles.get("ps", 0)
    ahead = roles.get("chief", 0) if chief_trains else 0
    placed += [("chief", index, 0) for index in range(roles.get("chief", 0))]
    placed += [
        ("worker", index, (index + ahead) % hosts) for index in range(roles.get("worker", 0))
    ]
    placed += [("ps", index, (-1 - index) % hosts) for index in range(roles.get("ps", 0))]
    for index in range(roles.get("evaluator", 0)):
        load = [sum(host == other for _, _, other in placed) for host in range(hosts)]
        placed.append(("evaluator", index, min(range(hosts), key=lambda h: (load[h], -h))))
    return placed


def trains(role: str, roles: Mapping[str, int]) -> bool:
    """Whether a task of ``role`` computes gradients, and so wants GPUs."""
    return role == "worker" or (role == "chief" and not roles.get("ps", 0))


def is_service(role: str, roles: Mapping[str, int]) -> bool:
    """Whether a task serves the others for ever, and is stopped once they are done."""
    return role in ("ps", "evaluator") or (role == "worker" and bool(roles.get("ps", 0)))

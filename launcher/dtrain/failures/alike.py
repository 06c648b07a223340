"""Shows a problem that many hosts have once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, NodeError
from dtrain.spec.model import Host

_Problem = TypeVar("_Problem", bound=DtrainError)


def messages(problems: Sequence[DtrainError], hosts: Sequence[Host]) -> list[str]:
    """The message of each kind of problem, see `of_one_kind`. It lists all hosts and shows the text
    of the first one."""
    entries = []
    for same in of_one_kind(problems, hosts):
        failed = [problem for problem in same if isinstance(problem, NodeError)]
        named = hostlist.fold(dict.fromkeys(problem.host for problem in failed))
        entries.append(f"{named}: {common_text(failed)}" if failed else same[0].message)
    return entries


def hints(problems: Sequence[DtrainError], hosts: Sequence[Host]) -> list[str]:
    """The hints of `messages`. Of hints that differ only in the host, the list has the first."""
    return [hint for same in with_one_hint(problems, hosts) if (hint := common_hint(same))]


def common_text(problems: Sequence[NodeError]) -> str:
    """What the first one says of its host, which stands for others that differ only in the host."""
    return _first(problems, [f"{one.attempted}: {one.reason}" for one in problems])


def common_hint(problems: Sequence[DtrainError]) -> str:
    """The first one's hint, which stands for others that differ only in the host."""
    return _first(problems, [problem.hint for problem in problems])


def _first(problems: Sequence[DtrainError], texts: Sequence[str]) -> str:
    first = problems[0]
    if isinstance(first, NodeError) and any(text != texts[0] for text in texts):
        return f"{texts[0]} (shown for {first.host}; same on the others)"
    return texts[0]


def of_one_kind(problems: Sequence[_Problem], hosts: Sequence[Host]) -> list[list[_Problem]]:
    """The problems of each kind, in the order of ``hosts``. Two problems are of one kind if they
    differ only in the host's name and address."""
    return _alike(problems, hosts, lambda problem: f"{problem.message}\0{problem.hint}")


def with_one_hint(problems: Sequence[_Problem], hosts: Sequence[Host]) -> list[list[_Problem]]:
    """As `of_one_kind`, of problems that may differ in their messages, too."""
    return _alike(problems, hosts, lambda problem: problem.hint)


def _alike(
    problems: Sequence[_Problem], hosts: Sequence[Host], text_of: Callable[[_Problem], str]
) -> list[list[_Problem]]:
    order = {host.name: place for place, host in enumerate(hosts)}
    kinds: dict[str, list[_Problem]] = {}
    for problem in sorted(problems, key=lambda p: order.get(getattr(p, "host", ""), len(order))):
        text = text_of(problem)
        if isinstance(problem, NodeError):
            names = {problem.host, problem.address}
            if problem.host in order:
                names.add(hosts[order[problem.host]].address)
            for own in sorted(names - {""}, key=len, reverse=True):
                text = re.sub(rf"(?<![\w.-]){re.escape(own)}(?![\w-])", "\0", text)
        kinds.setdefault(text, []).append(problem)
    return list(kinds.values())

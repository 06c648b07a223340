"""Shows a problem that many hosts have once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
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
        first, message = same[0], same[0].message
        if len(same) > 1 and isinstance(first, NodeError):
            named = _hosts_of(same)
            rest = message.removeprefix(first.host)
            message = f"{hostlist.fold(named)}{rest}{shown_for(first.host, named)}"
        entries.append(message)
    return entries


def hints(problems: Sequence[DtrainError], hosts: Sequence[Host]) -> list[str]:
    """The hints of `messages`. Of hints that differ only in the host, the list has the first."""
    entries = []
    kinds = [same[0] for same in of_one_kind(problems, hosts)]
    for same in with_one_hint(kinds, hosts):
        if hint := common_hint(same):
            entries.append(hint)
    return entries


def common_hint(problems: Sequence[DtrainError]) -> str:
    """The first one's hint, which stands for others that differ only in the host."""
    first, hint = problems[0], problems[0].hint
    if isinstance(first, NodeError) and any(one.hint != hint for one in problems):
        hint += shown_for(first.host, _hosts_of(problems))
    return hint


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
        if isinstance(problem, NodeError) and problem.host in order:
            host = hosts[order[problem.host]]
            for own in sorted({host.name, host.address}, key=len, reverse=True):
                text = re.sub(rf"(?<![\w.-]){re.escape(own)}(?![\w-])", "\0", text)
        kinds.setdefault(text, []).append(problem)
    return list(kinds.values())


def _hosts_of(problems: Sequence[DtrainError]) -> dict[str, None]:
    return dict.fromkeys(one.host for one in problems if isinstance(one, NodeError))


def shown_for(host: str, hosts: Collection[object]) -> str:
    """An addition to the text of one host that stands for all ``hosts``."""
    return f" (shown for {host}; same on the others)" if len(hosts) > 1 else ""

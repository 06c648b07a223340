"""Text with parts that are only known at launch: the port, the run's name, the attempt. Where an
engine allocates the hosts, also hosts, addresses and the number of each process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A part that is only known at launch."""

    value: str
    """The value in this plan; in a dry run, an example value."""
    shell: str
    """The part as a shell expansion, for users who run the scripts of a dry run by hand."""


@dataclass(frozen=True, slots=True)
class NodeSlot(Slot):
    """A part that only the node knows; ``value`` is its shell expansion too."""

    key: str
    """What the node puts there, see `dtrain.node.agent.containers`."""


class Template(str):
    """A string that remembers its slots. Other code uses it as a plain string."""

    _given: tuple[str | Slot, ...]

    def __new__(cls, *parts: str | Slot) -> Template:
        """Join ``parts``; a part that is a `Template` keeps its slots."""
        values = (part.value if isinstance(part, Slot) else part for part in parts)
        template = super().__new__(cls, "".join(values))
        template._given = parts
        return template

    @cached_property
    def parts(self) -> tuple[str | Slot, ...]:
        """Text and slots in turn. Found only when needed: each process has the addresses of all,
        and one script often shows those of one."""
        flat: list[str | Slot] = []
        for part in self._given:
            for each in part.parts if isinstance(part, Template) else (part,):
                if flat and isinstance(each, str) and isinstance(flat[-1], str):
                    flat[-1] += each
                else:
                    flat.append(each)
        return tuple(flat)


def joined(separator: str, texts: Iterable[str]) -> str:
    """``separator.join(texts)``, which keeps the slots."""
    texts = tuple(texts)
    if not any(isinstance(text, Template) for text in texts):
        return separator.join(texts)
    parts = [part for text in texts for part in (separator, text)][1:]
    return Template(*(part for part in parts if part or isinstance(part, Template)))


def number(name: str, value: object, *, scripted: bool) -> str:
    """A number that differs between processes, such as the rank, as text. If one script starts all
    processes (``scripted``), it is the shell variable ``dtrain_<name>`` there."""
    return Template(Slot(str(value), f"$dtrain_{name}")) if scripted else str(value)

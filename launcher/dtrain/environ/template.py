"""Text with parts that are only known at launch: the port, the run's name, the attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A part that is only known at launch."""

    value: str
    """The value in this plan; in a dry run, an example value."""
    shell: str
    """The part as a shell expansion, for users who run the scripts of a dry run by hand."""


class Template(str):
    """A string that remembers its slots. Other code uses it as a plain string."""

    parts: tuple[str | Slot, ...]

    def __new__(cls, *parts: str | Slot) -> Template:
        """Join ``parts``; a part that is a `Template` keeps its slots."""
        flat: list[str | Slot] = []
        for part in parts:
            flat += part.parts if isinstance(part, Template) else (part,)
        values = (part.value if isinstance(part, Slot) else part for part in flat)
        template = super().__new__(cls, "".join(values))
        template.parts = tuple(flat)
        return template

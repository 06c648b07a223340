"""The values of a ``config.json``, each found by the first of several names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class ConfigFile:
    values: Mapping[str, Any]
    where: str
    """The file's name, for errors."""
    name: str
    """The model's name, if the file has one."""

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type") or "")

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of keys that files of this type often omit."""
        return {}

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of ``names`` in the file; a dot enters an inner object."""
        for name in names:
            outer, _, inner = name.partition(".")
            value = self.values.get(outer)
            if inner:
                value = value.get(inner) if isinstance(value, dict) else None
            if value is not None:
                return value
        for name in names:
            if name in self.defaults:
                return self.defaults[name]
        return default

    def count(self, *names: str) -> int:
        """Return a whole number, 0 if the file has none."""
        value = self.get(*names, default=0)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        # Some files give a value for each layer.
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**9:
            given = next(name for name in names if self.get(name) is not None)
            self.refuse(f"{given} must be a whole number, not {value!r}")
            return 0
        return value

    def needed(self, *names: str) -> int:
        value = self.count(*names)
        if value < 1:
            others = [name for name in names[1:] if "." not in name]
            also = f" (or {', '.join(others)})" if others else ""
            self.refuse(f"{names[0]}{also} is missing")
        return value

    def refuse(self, message: str) -> None:
        raise UsageError(
            f"{self.where}: {message}",
            hint="fix the file, or give the sizes as `layers`, `hidden`, `heads`, `ffn_hidden`",
        )

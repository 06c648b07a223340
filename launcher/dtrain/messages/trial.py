"""What `dtrain.runtime.torch.trial` prints on a host. Pure."""

from __future__ import annotations

from typing import Annotated

from dtrain.messages.decode import ProtocolError, Range, decode, parse_object
from dtrain.records import dataclass

MARK = "dtrain-trial: "
MAX_LINE = 4096
_Bytes = Annotated[float, Range(0, 1 << 60)]


@dataclass(frozen=True, slots=True)
class TrialLine:
    """The measurement of one case."""

    layers: Annotated[int, Range(1, 1 << 20)]
    micro_batches: Annotated[int, Range(1, 1 << 40)]
    seconds: Annotated[float, Range(1e-9, 1e6)]
    fastest: Annotated[float, Range(1e-9, 1e6)]
    allocated: _Bytes | None = None
    resident: _Bytes | None = None


def trial_line(text: str) -> TrialLine | None:
    """The measurement in a line of output; None for another line, also of a malformed one."""
    if not text.startswith(MARK) or len(text) > MAX_LINE:
        return None
    try:
        found = parse_object(text.removeprefix(MARK).encode(errors="replace"))
        return decode(TrialLine, found, "trial")
    except ProtocolError:
        return None

"""Scripts as files of shell text, in which a launch plan fills the gaps. Pure.

In such a file, ``#: NAME`` is a gap for lines that depend on the plan. They get its indentation.
The lines from ``#if NAME`` to ``#end`` are only for some plans; these blocks do not nest. ``##``
begins a comment for readers of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_NOTE = re.compile(r"^ *##.*\n", re.MULTILINE)
_BLOCK = re.compile(r"^ *#if (\w+)\n(.*?)^ *#end\n", re.MULTILINE | re.DOTALL)
_GAP = re.compile(r"^( *)#: (\w+)\n", re.MULTILINE)


def fill(text: str, blocks: Mapping[str, bool], gaps: Mapping[str, Iterable[str]]) -> str:
    """The script ``text`` with the lines for ``gaps``, and with those ``blocks`` that are true.
    The gaps of other blocks are not read."""
    text = _NOTE.sub("", text)
    text = _BLOCK.sub(lambda block: block[2] if blocks[block[1]] else "", text)
    return _GAP.sub(lambda gap: "".join(f"{gap[1]}{line}\n" for line in gaps[gap[2]]), text)

"""The protocol between the launcher and the receiver of the working folder.

The launcher sends frames: a kind (u8), a length (u32) and that many bytes, big endian. A REQUEST is
compressed JSON. It is followed by the requested contents, RAW or DEFLATED, or by ABANDONED.
The receiver writes `PREAMBLE`, and each answer as a line of JSON, see `dtrain.messages.sync`.

Shipped to nodes, and the launcher imports it too: Python 3.8, standard library only.
"""

from __future__ import annotations

import struct

PREAMBLE = b"\x00dtrain-tree-1\n"
FRAME = struct.Struct(">BI")
REQUEST, RAW, DEFLATED, ABANDONED = 1, 2, 3, 4
CHUNK = 1 << 20
"""The most bytes of content in one frame, before compression."""

"""The protocol between the launcher and the facts program.

The program writes `PREAMBLE`. Then it answers each order, a line of JSON, by a line of JSON:

    clock   {"time": seconds since the epoch}
    gather  {"facts": {...}, "listening": {...}}
    dial    {"dialed": [...]}
    run     {"said": [...], "status": ...}

`dtrain.node.facts.orders` has the types of the orders, `dtrain.messages.facts` those of the
answers.

Shipped to nodes, and the launcher imports it too: Python 3.8, standard library only.
"""

from __future__ import annotations

PREAMBLE = b"\x00dtrain-facts-1\n"
RELEASE = b"release\n"
"""Ends the check and starts the relay, see `dtrain.node.checked_launch`. No answer follows."""

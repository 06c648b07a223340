"""Nodes and the launcher use the same names for processes."""

from __future__ import annotations

from dtrain.launchplan import names
from dtrain.node import names as of_node


def test_nodes_and_the_launcher_agree() -> None:
    assert of_node.process_name("ps", 12) == names.process_name("ps", 12)
    assert of_node.rank_name(3) == names.rank_name(3)
    assert names.parsed(of_node.process_name("ps", 12)) == ("ps", 12)

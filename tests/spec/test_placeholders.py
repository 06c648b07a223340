"""Placeholders in arguments and variables of a job."""

from dtrain.spec.placeholders import fill


def test_each_placeholder_of_a_text_gets_its_value() -> None:
    values = {"rank": "3", "world_size": "8"}
    assert fill("{rank} of {world_size}, ${rank}", values) == "3 of 8, ${rank}"

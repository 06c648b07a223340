"""Messages of the library name fields; on the command line they name options."""

from __future__ import annotations

import pytest

from dtrain_cli.options import as_options


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`micro_batch=3` does not divide", "--micro-batch 3 does not divide"),
        ("use `gpu='a100-80gb'`, or `gpus`", "use --gpu a100-80gb, or --gpus"),
        ("with `offload=True`", "with --offload"),
        ("with `sequence_parallel=False`", "with --no-sequence-parallel"),
        ("`bandwidth` uses torch", "--bandwidth uses torch"),
        ("`sinfo` lists the partitions", "`sinfo` lists the partitions"),
        ("set `job.layout`", "set `job.layout`"),
    ],
)
def test_fields_become_options(message: str, shown: str) -> None:
    assert as_options(message) == shown

"""Computing in 16 bits, in the copies that DataParallel makes, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.runtime.torch.precision import autocast, use_tensor_cores

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_replica_computes_with_its_own_parts(name: str, dtype: torch.dtype) -> None:
    module = nn.Linear(4, 4)
    called = autocast(module, torch.device("cpu"), name)
    replica = called._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    # What torch.nn.parallel.replicate does with the copies on each GPU.
    copy = nn.Linear(4, 2)
    for key, part in replica._modules.items():
        if part is module:
            replica._modules[key] = copy
    output = replica(torch.ones(1, 4))
    assert output.shape == (1, 2)
    assert output.dtype == dtype


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_float32_is_left_alone(name: str) -> None:
    module = nn.Linear(4, 4)
    assert autocast(module, torch.device("cpu"), name) is module


@pytest.mark.parametrize(
    ("name", "setting"), [(None, "highest"), ("fp32", "highest"), ("tf32", "high")]
)
def test_tf32_only_where_the_file_says_so(name: str | None, setting: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        use_tensor_cores(name)
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)

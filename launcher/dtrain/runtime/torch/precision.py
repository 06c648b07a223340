"""The precision of the computation. Weights and gradient sums stay in float32."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import nn

COMPUTE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def use_tensor_cores(precision: str | None) -> None:
    """Let GPUs multiply float32 matrices in TF32 if ``precision`` is ``tf32``. Otherwise PyTorch's
    setting stays: full float32, unless the script has changed it."""
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")


class _Autocast(nn.Module):
    """A module that enters autocast itself. DataParallel calls its copies in new threads, which
    would use autocast's default type and would not see a patched ``forward``."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self._cast = device_type, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self._cast):
            return self.module(*args, **kwargs)


def autocast(module: nn.Module, device: torch.device, precision: str) -> nn.Module:
    """A module that computes ``module`` in ``precision``, for modules that FSDP does not cast."""
    if COMPUTE[precision] is torch.float32:
        return module
    return _Autocast(module, device.type, COMPUTE[precision])


class LossScaleState(TypedDict):
    """The state of a loss scale in a checkpoint."""

    scale: float
    good_steps: int


class LossScale:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

    float16 loses gradients below 6e-8, so the loss is scaled up before its backward pass. If a
    gradient overflows, the step is skipped and the scale halves. After 2000 steps without
    overflow, the scale doubles. If ``enabled`` is false, the scale stays at 1.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 2.0**16 if enabled else 1.0
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Record a step. All ranks pass the same ``finite``, so all keep the same scale."""
        if not self.enabled:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self._good_steps == 2000:
            self.scale *= 2
            self._good_steps = 0

    def state_dict(self) -> LossScaleState | None:
        """The state for `load_state_dict`."""
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else None

    def load_state_dict(self, state: LossScaleState | None) -> None:
        """Continue from a checkpoint, if both that run and this one scale the loss."""
        if self.enabled and state is not None:
            self.scale, self._good_steps = state["scale"], state["good_steps"]

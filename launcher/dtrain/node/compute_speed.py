"""Measures what one device computes: matrix products, attention and copies in its memory.

A part of the rank's program of `dtrain plan --probe`, see `dtrain.node.bandwidth`. All ranks of a
host measure at the same moment, as they train: CPU ranks share the host's cores and memory.
"""

from __future__ import annotations

import os
import time
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Json = dict[str, Any]

SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices."""
HEAD = 128
TOKENS = 2048
HEADS = {"cuda": 32, "cpu": 2}
COPY = {"cuda": 1 << 30, "cpu": 64 << 20}
"""Bytes of a copy: more than any cache holds."""
LONG = {"cuda": 2.0, "cpu": 0.2}
"""Seconds of one measurement. GPUs lower their clock after about a second of full load."""
SLOW = 0.1
"""Seconds of a product. No larger one is measured after it: it takes eight times as long."""


def measure_compute(torch: Any, device: str) -> Json:
    """The speed of ``device``. Raises what torch raises."""
    kind = device.partition(":")[0]
    found: Json = {"precision": {}, "memory": _memory(torch, device)}
    found["device"] = torch.cuda.get_device_name(device) if kind == "cuda" else "cpu"
    for name in _precisions(torch, device):
        # "high" uses TF32.
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        rows = []
        for size in SIZES:
            one = torch.randn(size, size, device=device, dtype=dtype)
            seconds = _seconds(torch, kind, partial(torch.matmul, one, one))
            rows.append([size, 2.0 * size**3 / seconds / 1e12])
            if seconds > SLOW:
                break
        found["precision"][name] = rows
    found["copy"] = _copy(torch, device, kind)
    found["attention"] = _attention(torch, device, kind)
    return found


def _precisions(torch: Any, device: str) -> tuple[str, ...]:
    """A 16-bit format of the device and those of 32 bits. NVIDIA GPUs before the A100 have neither
    bfloat16 nor TF32."""
    if device == "cpu" or torch.version.hip is not None:
        return "bfloat16", "float32"
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return "bfloat16", "tf32", "float32"
    return "float16", "float32"


def _copy(torch: Any, device: str, kind: str) -> float:
    """Bytes/s read and written by a copy."""
    source = torch.zeros(COPY[kind] // 4, device=device)
    into = torch.empty_like(source)
    seconds = _seconds(torch, kind, lambda: into.copy_(source))
    return 2 * COPY[kind] / seconds


def _attention(torch: Any, device: str, kind: str) -> float:
    """TFLOP/s of the forward pass of causal attention, which skips half of the scores."""
    heads = HEADS[kind]
    shape = (1, heads, TOKENS, HEAD)
    # CPUs may emulate 16 bits.
    dtype = torch.float32 if kind == "cpu" else torch.float16
    query = torch.randn(shape, device=device, dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = _seconds(torch, kind, lambda: attend(query, query, query, is_causal=True))
    return 2.0 * heads * TOKENS**2 * HEAD / seconds / 1e12


def _memory(torch: Any, device: str) -> int:
    """Bytes of the device; of a CPU, the host's share of each rank."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _seconds(torch: Any, kind: str, act: Callable[[], Any]) -> float:
    """Seconds of one ``act`` in a loop, after a warm-up."""

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad():
        act()
        wait()
        begun = time.monotonic()
        act()
        wait()
        once = max(time.monotonic() - begun, 1e-7)
        count = max(1, min(100_000, int(LONG[kind] / once)))
        begun = time.monotonic()
        for _ in range(count):
            act()
        wait()
        return (time.monotonic() - begun) / count

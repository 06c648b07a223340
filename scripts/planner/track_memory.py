#!/usr/bin/env python3
"""What the training runtime needs on one GPU, counted tensor by tensor; needs no GPU itself.

    scripts/planner/track_memory.py '{"model": {"layers": 4, ...}, "layout": {"tensor": 8, ...}}'
    scripts/planner/track_memory.py --record [NAME ...]   cases of memory_cases.json, or all of them

Puts the recipe's model (``scripts/recipes/train_gpt.py``) under a layout by ``dtrain.runtime``
itself, as one rank of a fake process group, and runs whole optimizer steps on fake tensors, which
have sizes and lifetimes but no values. Every storage that is alive counts, rounded up to the 512
bytes of the CUDA caching allocator. The planner's formulas are not used.

What it counts is what the allocator calls *allocated*: no CUDA context, no NCCL buffers, no
fragmentation and no scratch memory inside a kernel.

A build of torch without CUDA cannot run autograd on fake ``cuda`` tensors, so the tensors are fake
``cpu`` ones. The operators that differ by device are replaced by the GPU's: flash attention by its
CUDA name, and RMS norm as the fused kernel, which saves its input and one number per token. FSDP,
DTensor and the pipeline schedules do the same on both devices.

A case is a JSON object: ``model`` has fields of `Shape`, ``layout`` those of `Layout`, and
``stage`` is the pipeline rank to look at, 0 if absent. ``held_out`` marks cases that no formula
may be fitted to.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F  # noqa: N812 - the name everyone gives it
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import extract_tensor_metas
from torch.distributed.pipelining.stage import InferenceMode, PipelineStage
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "recipes"))

from train_gpt import GPT, Config, cross_entropy

from dtrain.runtime import torch as parallel
from dtrain.runtime.torch import context, experts, parallelize, recompute, tensor
from dtrain.runtime.torch import run as runs

RECORD = ROOT / "tests" / "parallelism" / "memory_cases.json"
ROUNDING = 512
"""Bytes that the CUDA caching allocator rounds every size up to."""
STEPS = 3
"""The first step makes the optimizer's states, and fills caches with tensors of its own."""


class Tracker(TorchDispatchMode):
    """Bytes in all storages that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.born: dict[int, tuple[str, ...]] = {}
        self.now = self.peak = 0
        self.at_peak: list[tuple[int, tuple[str, ...]]] = []
        self.listing = self.paused = False
        self.on_host: set[int] = set()
        """Storages in the host's memory, which do not count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            # A DTensor's own operators come back here, on the shards.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        # Operators compute where their inputs are.
        on_host = bool(self.on_host) and any(map(self.is_on_host, tree_leaves((args, kwargs))))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                if on_host:
                    self.host(leaf)
                else:
                    self.add(leaf.untyped_storage(), str(func), leaf)
        return result

    def host(self, tensor: Tensor) -> None:
        """Do not count ``tensor``, which is in the host's memory, unless its storage counts."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes and key not in self.on_host:
            weakref.finalize(storage, self.on_host.discard, key)
            self.on_host.add(key)

    def states(self, tensors: Iterable[Tensor], *, offload: bool) -> None:
        """Count parameters and buffers. Parameters are in the host's memory with ``offload``."""
        for value in tensors:
            local = value._local_tensor if isinstance(value, tensor.DTensor) else value
            if offload and isinstance(value, nn.Parameter):
                self.host(local)
            else:
                self.add(local.untyped_storage(), "parameter", local)

    def is_on_host(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.on_host

    def add(self, storage: torch.UntypedStorage, by: str, leaf: Tensor) -> None:
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self._drop, key)
            self.sizes[key] = 0
            self.born[key] = (by, str(leaf.dtype), str(tuple(leaf.shape)))
        self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            size = -(-storage.size() // ROUNDING) * ROUNDING
            self.now += size - self.sizes[key]
            self.sizes[key] = size
            if self.now > self.peak:
                self.peak = self.now
                if self.listing:
                    self.at_peak = [(size, self.born[key]) for key, size in self.sizes.items()]

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def host_memory(tracker: Tracker) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`recompute.to_host` and `recompute.from_host` with a host whose memory does not count."""

    def to_host(tensor: Tensor, _device: Any) -> Tensor:
        tracker.paused = True
        try:
            host = torch.empty_like(tensor).copy_(tensor)
        finally:
            tracker.paused = False
        tracker.host(host)
        return host

    def from_host(kept: Tensor, _device: Any) -> Tensor:
        if not tracker.is_on_host(kept):
            return kept
        return torch.empty(kept.shape, dtype=kept.dtype).copy_(kept)

    return to_host, from_host


def between_host_and_device(tracker: Tracker) -> Callable[..., Tensor]:
    """`Tensor.to` for FSDP2's copies to the other device, of which the CPU has only one: shards of
    parameters to the GPU, shards of gradients to the host."""
    to, (to_host, from_host) = Tensor.to, host_memory(tracker)

    def copied(value: Tensor, *args: Any, **options: Any) -> Tensor:
        if not (args and isinstance(args[0], torch.device)) or isinstance(value, tensor.DTensor):
            return to(value, *args, **options)
        return (from_host if tracker.is_on_host(value) else to_host)(value, args[0])

    return copied


# What CUDA does otherwise than the CPU.


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(
    x: Tensor, _shape: Any, weight: Tensor | None = None, _eps: float | None = None
) -> Tensor:
    assert weight is not None
    if torch.is_autocast_enabled("cpu"):
        # CUDA's autocast has it on its list of what is computed in 32 bits.
        x, weight = x.float(), weight.float()
    if isinstance(x, tensor.DTensor) and isinstance(weight, tensor.DTensor):
        mesh, placements = x.device_mesh, x.placements
        summed = [tensor.Replicate() if p.is_replicate() else torch.distributed.tensor.Partial()
                  for p in placements]  # fmt: skip
        whole = weight.to_local(grad_placements=summed)
        normalized = _FusedRMSNorm.apply(x.to_local(), whole)
        return tensor.DTensor.from_local(normalized, mesh, placements, run_check=False)
    return _FusedRMSNorm.apply(x, weight)


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
    share = context._current.get()
    if share is not None and attn_mask is None:
        return share.attention(q, k, v, **options)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (part.to(torch.bfloat16) for part in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


@dataclass
class _Mask:
    """Its sizes are all that the GPU's flash attention takes of a causal mask."""

    seq_len_q: int
    seq_len_kv: int


def _adamw(model: parallel.ParallelModel) -> torch.optim.Optimizer:
    parameters = model.parameters()
    # On CUDA it is ``foreach`` by itself, for parameters that are not DTensors.
    foreach = all(type(parameter) is nn.Parameter for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=foreach)


# A run.


def config_of(model: dict[str, Any]) -> Config:
    """The recipe's sizes, from a case's fields of `Shape`."""
    return Config(
        width=model["hidden"],
        layers=model["layers"],
        heads=model["heads"],
        kv_heads=model.get("kv_heads", model["heads"]),
        mlp_width=model["ffn_hidden"],
        vocabulary=model["vocab"],
        experts=model.get("experts", 0),
        active=model.get("experts_per_token", 2),
    )


def track(case: dict[str, Any], *, listing: bool = False) -> dict[str, Any]:
    """Bytes on the rank: ``peak`` of a step, and what stays ``between_steps``."""
    layout = parallel.Layout(**case["layout"])
    stage = case.get("stage", 0)
    rank = stage * (layout.world_size // layout.pipeline)
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        training = parallel.Training(
            layout.global_batch, case.get("precision", "bf16"), case["model"]["seq_len"]
        )
        # Its mesh needs real numbers.
        run = runs.ParallelRun("3d", layout, training, torch.device("cpu"), owns=False)
        with FakeTensorMode(), ExitStack() as stack:
            return _track(case, run, stack, listing)
    finally:
        dist.destroy_process_group()


def _track(
    case: dict[str, Any], run: parallel.ParallelRun, stack: ExitStack, listing: bool
) -> dict[str, Any]:
    layout, model, length = run.layout, case["model"], case["model"]["seq_len"]
    config = config_of(model)
    # Each expert gets the same number of tokens.
    routed = layout.micro_batch * length // layout.context * config.active
    tracker = Tracker()
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        tracker.resized(storage)

    def initialize(
        schedule: Any, stages: list[PipelineStage], *_args: Any, **_options: Any
    ) -> tuple[bool, bool]:
        """What the stages tell each other of the tensors that they send."""
        if not schedule._dtrain_ready:
            split = layout.tensor if layout.sequence_parallel else 1
            stream = torch.empty(
                layout.micro_batch, length // layout.context // split, config.width,
                dtype=torch.bfloat16, requires_grad=True,
            )  # fmt: skip
            for one in stages:
                one._inference_mode = InferenceMode.STATIC
                one._user_meta.inputs = one._user_meta.outputs = extract_tensor_metas((stream,))
                one._prepare_forward_infra(layout.grad_accumulation, None, has_backward=True)
                one._prepare_backward_infra(layout.grad_accumulation)
            schedule._dtrain_ready = True
        return True, True

    def real(function: Any) -> Any:
        """A mesh's ranks are numbers, not fake."""

        def call(*args: Any, **options: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **options)

        return call

    infer = ShardingPropagator._propagate_tensor_meta_non_cached

    def infer_uncounted(*args: Any, **options: Any) -> Any:
        """DTensor asks for an output's shape by whole tensors that are fake on a GPU too."""
        tracker.paused = True
        try:
            return infer(*args, **options)
        finally:
            tracker.paused = False

    to_host, from_host = host_memory(tracker)
    for target, name, new in (
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", infer_uncounted),
        (DeviceMesh, "__init__", real(DeviceMesh.__init__)),
        (_MeshLayout, "remap_to_tensor", real(_MeshLayout.remap_to_tensor)),
        (torch.UntypedStorage, "resize_", resize_),
        (F, "rms_norm", _rms_norm),
        (F, "scaled_dot_product_attention", _attention),
        # Fake tensors have no values to give or to compare.
        (parallelize.Materializer, "__call__", lambda *_: None),
        (parallelize.Materializer, "holders", lambda *_: None),
        (experts, "sizes", lambda counts: [routed // len(counts)] * len(counts)),
        (tensor.TensorSplit, "refuse", lambda *_: None),
        (tensor.TensorSplit, "with_draws", lambda split, *_: split),
        (context.SequenceShare, "refuse", lambda *_: None),
        (context, "causal_lower_right", _Mask),
        (recompute, "to_host", to_host),
        (recompute, "from_host", from_host),
        (parallelize, "same_when_split", lambda *_: True),
        (parallelize, "refuse_different_weights", lambda *_: None),
        (parallelize, "agreed", ExitStack),
        (schedules._PipelineSchedule, "_dtrain_ready", False),
        (schedules._PipelineSchedule, "_initialize_pp_stages", initialize),
        (schedules, "_batch_p2p", lambda *_args, **_options: []),
        (schedules, "_sorted_batch_p2p", lambda *_args, **_options: {}),
        *([(Tensor, "to", between_host_and_device(tracker))] if layout.offload else ()),
    ):
        stack.enter_context(patch.object(target, name, new, create=name.startswith("_dtrain")))

    gpt = GPT(config)
    if model.get("tied"):
        gpt.head.weight = gpt.embedding.weight
    parallelized = run.parallelize(gpt, loss=cross_entropy)
    del gpt
    optimizer = _adamw(parallelized)
    here = layout.global_batch // run.data_size
    inputs, targets = torch.zeros(2, here, length, dtype=torch.int64)
    for part in parallelized.parts:
        tracker.states((*part.parameters(), *part.buffers()), offload=layout.offload)
    with tracker:
        for step in range(STEPS):
            tracker.peak, tracker.listing = 0, listing and step == STEPS - 1
            loss = parallelized.gradients(inputs, targets)
            parallelized.clip_gradients(1.0)
            parallelized.step(optimizer)
            del loss
    answer: dict[str, Any] = {"peak": tracker.peak, "between_steps": tracker.now}
    if listing:
        answer["live"] = [[size, *born] for size, born in sorted(tracker.at_peak)[::-1] if size]
    return answer


def track_apart(case: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, because the fake process group is the process's only one.

    Raises CalledProcessError, its reason on stderr.
    """
    command = [sys.executable, __file__, json.dumps(case)]
    answer: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )
    return answer


def record(names: list[str]) -> None:
    """Track the cases of the record again, those in ``names`` or all of them."""
    entries = json.loads(RECORD.read_text())["cases"]
    chosen = [entry for entry in entries if not names or entry["name"] in names]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(track_apart, chosen)
        for entry, answer in zip(chosen, answers, strict=True):
            entry |= answer
            lines = ",\n".join(map(json.dumps, entries))
            version = torch.__version__.split("+")[0]
            RECORD.write_text(f'{{"torch": "{version}", "cases": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", help="a case as a JSON object; names with --record")
    parser.add_argument("--live", action="store_true", help="list what is alive at the peak")
    parser.add_argument("--record", action="store_true", help=f"rewrite {RECORD.name}")
    options = parser.parse_args()
    if options.record:
        record(options.case)
    elif len(options.case) == 1:
        json.dump(track(json.loads(options.case[0]), listing=options.live), sys.stdout)
        print()
    else:
        parser.error("give one case, or --record")


if __name__ == "__main__":
    main()

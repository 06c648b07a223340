"""Memory that a real torch model needs per GPU under FSDP2, counted tensor by tensor.

Builds a Llama-like or GPT-like module, shards it with ``fully_shard`` over a fake process group
and runs whole training steps under torch's fake-tensor mode, which knows every tensor's size and
lifetime but computes nothing. ``torch.distributed._tools.FSDPMemTracker`` adds up what is alive.
It knows nothing of the planner and shares no formula with it.

    python tests/parallelism/fsdp_oracle.py '{"layers": 2, "hidden": 256, ...}'   one case
    python tests/parallelism/fsdp_oracle.py --record     every case of oracle_cases.json (8 min)

It has to be a process of its own: the fake process group is the process's only one.

What it counts is what the caching allocator would call *allocated*: no CUDA context, no NCCL
buffers, no fragmentation, and no scratch memory inside one kernel (flash attention's backward
keeps a 32-bit copy of the query's gradient there, and of keys and values at full head count under
grouped-query attention).

A build of torch without CUDA cannot run autograd on fake ``cuda`` tensors (it aborts: no device
guard), so the tensors are fake ``cpu`` ones, and the two operators that differ by device are the
GPU's: flash attention by its CUDA name, and RMS norm as the fused kernel, which saves its input
and one number per token (a CPU's saves two 32-bit copies of its input). FSDP2 itself does the
same on both devices. Sizes are not rounded up to the allocator's 512 bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

RECORD = Path(__file__).with_name("oracle_cases.json")


@dataclass(frozen=True)
class Case:
    """One training job. Names and units are those of ``dtrain.parallelism``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    seq_len: int
    gated: bool = True
    """True: Llama (RMS norm, rotary positions, SwiGLU, no biases). False: GPT (layer norm,
    learned positions, GELU, biases)."""
    tied: bool = False
    data: int = 8
    """Ranks that the model is sharded over."""
    micro_batch: int = 1
    grad_accumulation: int = 1
    recompute: Literal["none", "full"] = "none"
    reshard_after_forward: bool = True
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: Literal["foreach", "fused"] = "foreach"
    name: str = ""


# ---- the models


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal flash attention over (batch, heads, seq, head_size), as SDPA runs it on a GPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


class FusedRMSNorm(torch.autograd.Function):
    """``F.rms_norm`` as on a GPU: one kernel for each pass, which saves its input and 1/rms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FusedRMSNorm.apply(x, self.weight)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (batch, seq, heads, head_size), in 32 bits as Llama's code does."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None, :]).flatten(3).type_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        h, size = case.hidden, case.hidden // case.heads
        self.heads, self.kv_heads = case.heads, case.kv_heads
        self.attention_norm = RMSNorm(h)
        self.wq = nn.Linear(h, case.heads * size, bias=False)
        self.wk = nn.Linear(h, case.kv_heads * size, bias=False)
        self.wv = nn.Linear(h, case.kv_heads * size, bias=False)
        self.wo = nn.Linear(case.heads * size, h, bias=False)
        self.ffn_norm = RMSNorm(h)
        self.w1 = nn.Linear(h, case.ffn_hidden, bias=False)
        self.w2 = nn.Linear(case.ffn_hidden, h, bias=False)
        self.w3 = nn.Linear(h, case.ffn_hidden, bias=False)

    def attention(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = rotate(q.view(b, s, self.heads, -1), angles)
        k = rotate(k.view(b, s, self.kv_heads, -1), angles)
        v = v.view(b, s, self.kv_heads, -1)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class GptBlock(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        h = case.hidden
        self.heads = case.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, case.ffn_hidden), nn.Linear(case.ffn_hidden, h)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(h, dim=2)
        )
        return self.proj(attend(q, k, v).transpose(1, 2).reshape(b, s, h))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Transformer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        if not case.gated and case.kv_heads != case.heads:
            raise ValueError("the GPT-like model has as many key heads as query heads")
        h = case.hidden
        self.embedding = nn.Embedding(case.vocab, h)
        self.positions = None if case.gated else nn.Embedding(case.seq_len, h)
        block = LlamaBlock if case.gated else GptBlock
        self.layers = nn.ModuleList(block(case) for _ in range(case.layers))
        self.norm = RMSNorm(h) if case.gated else nn.LayerNorm(h)
        self.output = nn.Linear(h, case.vocab, bias=False)
        if case.tied:
            self.output.weight = self.embedding.weight
        turns = h // case.heads // 2 if case.gated else 0
        self.register_buffer(
            "angles", torch.empty(case.seq_len, turns, dtype=torch.complex64), persistent=False
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


# ---- the tracker


class Tracker(FSDPMemTracker):
    """Also records the peak of each phase of the step, and the live tensors at the highest peak."""

    def __init__(self, mod: nn.Module, optm: torch.optim.Optimizer) -> None:
        super().__init__(mod, optm)
        self.op = ""
        self.restart()

    def restart(self, *, expected_peak: int | None = None) -> None:
        """Forget the peaks so far. At ``expected_peak`` bytes, list the live tensors."""
        self.phase = "start"
        self.phases: dict[str, dict[str, Any]] = {}
        self.peak = 0
        self.live: Counter[tuple[str, ...]] = Counter()
        self.expected_peak = expected_peak

    def enter(self, phase: str) -> None:
        self.phase = phase

    def now(self) -> dict[str, int]:
        """Bytes of each category that is not empty, and their ``Total``."""
        found = self._curr_mem_snap.get(torch.device("cpu"), {})
        return {getattr(key, "value", key): count for key, count in found.items() if count}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.op = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track(self, reftype: Any, t: torch.Tensor) -> None:
        known = t.untyped_storage() in self._WINFO
        super()._track(reftype, t)
        if not known and t.untyped_storage() in self._WINFO:
            winfo, _ = self._WINFO[t.untyped_storage()]
            winfo.born = (self.module(), self.op, str(t.dtype), str(tuple(t.shape)))

    def module(self) -> str:
        return max(self._mod_tracker.parents, key=lambda name: (name.count("."), len(name), name))

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        total = self._curr_mem_snap.get(torch.device("cpu"), {}).get("Total", 0)
        if total > self.phases.get(self.phase, {"peak": 0})["peak"]:
            self.phases[self.phase] = {
                "peak": total,
                "module": self.module().removeprefix("FSDPTransformer").lstrip("."),
                "op": self.op,
                "bytes": self.now(),
            }
            self.peak = max(self.peak, total)
            if total == self.expected_peak:
                self.live = self.listing()

    def listing(self) -> Counter[tuple[str, ...]]:
        """Bytes alive by (category, module, operator, dtype, shape) of birth."""
        found: Counter[tuple[str, ...]] = Counter()
        for winfo, _ in self._WINFO.values():
            born = getattr(winfo, "born", ("", "", "", ""))
            found[(winfo.reftype.value, *born)] += winfo.mem_consumed
        return found


# ---- a run


def ask(case: Case, *, listing: bool = False) -> dict[str, Any]:
    """Run two steps of ``case`` and describe the second one, which is like all later steps.

    Returns bytes on one rank:

    - ``parameters``: how many the whole model has
    - ``between_steps``: what stays, by the tracker's categories
    - ``after_forward``: by category, the logits included
    - ``peak``, and ``phase``, the phase it is in
    - ``phases``: for each, its ``peak``, those ``bytes`` by category, and the ``module`` and ``op``
      then running. In order: ``forward``; ``loss``, the cross-entropy forward and backward, until
      there is a gradient of the 16-bit logits; ``backward``, of the output layer and the layers;
      ``root``, the embedding's backward and the reduction of all that the layers do not own;
      ``optimizer``
    - ``live`` (with ``listing``): the tensors alive at the peak as (bytes, category, module,
      operator, dtype, shape) of their birth, largest first

    The tracker calls ``Temp`` what is made in backward, recomputed activations included, and
    calls the fp32 copies of the optimizer ``OptState``.
    """
    dist.init_process_group("fake", rank=0, world_size=case.data, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (case.data,))
        with FakeTensorMode():
            return _train(case, mesh, listing)
    finally:
        dist.destroy_process_group()


def _train(case: Case, mesh: DeviceMesh, listing: bool) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, case.param_dtype), reduce_dtype=getattr(torch, case.reduce_dtype)
    )
    model = Transformer(case)
    parameters = sum(p.numel() for p in model.parameters())
    if case.recompute == "full":
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False)
    for layer in model.layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard_after_forward
        )
    # The root keeps its default: its parameters stay whole from forward to backward.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{case.optimizer: True})
    tokens = torch.zeros(case.micro_batch, case.seq_len, dtype=torch.int64)
    labels = torch.zeros(case.micro_batch, case.seq_len, dtype=torch.int64)

    tracker = Tracker(model, optimizer)
    tracker.track_inputs((tokens, labels))
    model.embedding.register_forward_hook(
        lambda _module, _args, out: out.register_hook(lambda _: tracker.enter("root")) and None
    )
    with tracker:
        # The first step only creates the optimizer states; a listing needs to know the peak first.
        for _ in range(3 if listing else 2):
            tracker.restart(expected_peak=tracker.peak if listing else None)
            for _ in range(case.grad_accumulation):
                tracker.enter("forward")
                logits = model(tokens)
                after_forward = tracker.now()
                tracker.enter("loss")
                logits.register_hook(lambda _: tracker.enter("backward"))
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
                del logits
                loss.backward()
                del loss
                tracker.reset_mod_stats()
            tracker.enter("optimizer")
            optimizer.step()
            optimizer.zero_grad()
        between_steps = tracker.now()
    answer = {
        "parameters": parameters,
        "between_steps": between_steps,
        "after_forward": after_forward,
        "peak": tracker.peak,
        "phase": max(tracker.phases, key=lambda phase: tracker.phases[phase]["peak"]),
        "phases": tracker.phases,
    }
    if listing:
        answer["live"] = [[size, *born] for born, size in tracker.live.most_common()]
    return answer


def ask_apart(case: dict[str, Any]) -> dict[str, Any]:
    """Ask in a separate process. Raises CalledProcessError; the reason is on stderr."""
    command = [sys.executable, __file__, json.dumps(case)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def record() -> None:
    """Measure all cases of the record again, and write the answers into it."""
    cases = [entry["case"] for entry in json.loads(RECORD.read_text())["entries"]]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask_apart, cases))
    entries = [
        {"case": case, "answer": answer} for case, answer in zip(cases, answers, strict=True)
    ]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    version = torch.__version__.split("+")[0]
    RECORD.write_text(f'{{"torch": "{version}", "entries": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", help="a case as a JSON object")
    parser.add_argument("--live", action="store_true", help="list the tensors alive at the peak")
    parser.add_argument("--record", action="store_true", help=f"rewrite {RECORD.name}")
    options = parser.parse_args()
    if options.record:
        record()
    elif options.case:
        json.dump(ask(Case(**json.loads(options.case)), listing=options.live), sys.stdout, indent=1)
        print()
    else:
        parser.error("name a case, or --record")


if __name__ == "__main__":
    main()

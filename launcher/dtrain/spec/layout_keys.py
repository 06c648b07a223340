"""The keys of ``job.layout``, ``job.training`` and ``job.expected``."""

from __future__ import annotations

from typing import get_args

from dtrain.runtime.layout import SCHEDULES, BackendName, Recompute, Reduce, Sharding
from dtrain.spec.scalars import Choice, Flag, Integer, Number, OneNumber
from dtrain.spec.schema import Field, SectionType

_SIZE = Integer(1, 1_000_000)

LAYOUT = SectionType(
    {
        "tensor": Field(
            _SIZE,
            "Tensor parallel size: the GPUs that share each layer.",
            otherwise="1; the GPUs of one host with strategy tensor",
            example="8",
        ),
        "pipeline": Field(
            _SIZE,
            "Pipeline parallel size: the number of stages.",
            otherwise="1; all GPUs with strategy pipeline",
            example="2",
        ),
        "virtual_pipeline": Field(
            _SIZE,
            "Parts of each stage in an interleaved pipeline schedule.",
            default=1,
            example="2",
        ),
        "schedule": Field(
            Choice(SCHEDULES),
            "Order of the micro-batches in a pipeline: all forward passes first (gpipe); each "
            "backward pass as early as possible (1f1b, interleaved if virtual_pipeline is above "
            "1); or zero-bubble schedules that split the backward pass (zb-1p, zb-v).",
            default="1f1b",
            example="gpipe",
        ),
        "context": Field(
            _SIZE,
            "Context parallel size: the GPUs that share each sequence.",
            default=1,
            example="2",
        ),
        "expert": Field(
            _SIZE,
            "Expert parallel size: the GPUs that share the experts. They are a part of the data "
            "ranks.",
            default=1,
            example="8",
        ),
        "data": Field(
            _SIZE,
            "Data parallel size: replicas or shards that process different data.",
            otherwise="the remaining workers; 1 with strategy 3d or none",
            example="4",
        ),
        "sharding": Field(
            Choice(get_args(Sharding)),
            "What the data ranks shard: optimizer states (optimizer: ZeRO-1), also gradients "
            "(gradients: ZeRO-2), also parameters (full: ZeRO-3, FSDP), or everything within "
            "groups, with a copy in each group (hybrid: HSDP).",
            otherwise="what the strategy implies, else none",
            example="full",
        ),
        "shard": Field(
            _SIZE,
            "Data ranks in one group of hybrid sharding.",
            otherwise="the GPUs of one host with strategy hsdp",
            example="8",
        ),
        "micro_batch": Field(
            _SIZE,
            "Sequences in one forward pass of one replica.",
            otherwise="what training.global_batch implies, else 1",
            example="4",
        ),
        "grad_accumulation": Field(
            _SIZE,
            "Micro-batches of one replica in one optimizer step.",
            otherwise="what training.global_batch implies, else 1, or twice the pipeline stages",
            example="32",
        ),
        "recompute": Field(
            Choice(get_args(Recompute)),
            "Activations to recompute in the backward pass, to save memory.",
            default="none",
            example="selective",
        ),
        "sequence_parallel": Field(
            Flag(),
            "Split the activations outside the tensor parallel layers along the sequence.",
            default=False,
            example="true",
        ),
        "offload": Field(
            Flag(),
            "Keep parameters, gradients and optimizer states in host memory. Several micro-batches "
            "with sharded gradients are slow then: the host adds them up. `AdamW(…, fused=True)` "
            "updates there two to six times as fast.",
            default=False,
            example="true",
        ),
        "offload_activations": Field(
            Flag(),
            "Let dtrain.runtime keep what layers save for their backward pass in host memory.",
            default=False,
            example="true",
        ),
        "reduce": Field(
            Choice(get_args(Reduce)),
            "Number format in which dtrain.runtime adds up gradients over ranks.",
            default="fp32",
            example="bf16",
        ),
        "compile": Field(
            Flag(),
            "Let dtrain.runtime compile each layer with torch.compile. On CPUs this needs a C++ "
            "compiler on the hosts.",
            default=False,
            example="true",
        ),
        "backend": Field(
            Choice(get_args(BackendName)),
            "The software that trains the layout: dtrain.runtime, or a script's own. `dtrain plan` "
            "plans for it. A backend other than runtime needs `strategy: none`.",
            default="runtime",
            example="megatron",
        ),
    }
)

TRAINING = SectionType(
    {
        "global_batch": Field(
            Integer(1, 10**9), "Sequences or samples in one optimizer step.", example="512"
        ),
        "precision": Field(
            Choice(("fp32", "tf32", "fp16", "bf16", "fp8", "nvfp4")),
            "Number format of the computation. tf32 is fp32 with matrix products in TF32, which is "
            "several times faster on A100 and newer GPUs; fp32 does not use TF32.",
            example="bf16",
        ),
        "seq_len": Field(Integer(1, 10**9), "Tokens in one sequence.", example="2048"),
        "state_bits": Field(
            OneNumber((16, 32)),
            "Bits of weights, gradients and Adam's moments: 32, or 16 without a copy in 32, which "
            "torchtitan can train (`training.dtype`).",
            example="16",
        ),
        "overlap_experts": Field(
            Flag(),
            "Whether the software exchanges tokens between experts while it computes others, as "
            "`dtrain plan --overlap-experts` assumes. A script for Megatron-LM then needs "
            "`overlap_moe_expert_parallel_comm` (Megatron-Core 0.14, PyTorch 2.6), the alltoall "
            "or flex dispatcher, no `moe_shared_expert_overlap`, interleaved stages if there is "
            "a pipeline, and CUDA_DEVICE_MAX_CONNECTIONS above 1, such as 32.",
            example="true",
        ),
        "cuda_graph": Field(
            Flag(),
            "Whether one CUDA graph has the whole step, as `dtrain plan --cuda-graph` assumes. A "
            "script for Megatron-LM then needs `cuda_graph_impl` full_iteration (Megatron-Core "
            "0.18), no checks of NaN in losses and gradients, and for experts a fixed capacity or "
            "`moe_paged_stash`.",
            example="true",
        ),
    }
)

EXPECTED = SectionType(
    {
        "step_time": Field(Number(), "Seconds of one optimizer step.", example="7.15"),
        "compute_time": Field(
            Number(),
            "Seconds of a step in which a rank computes. In the rest it communicates or waits.",
            example="6.3",
        ),
        "memory_gib": Field(
            Number(),
            "Peak memory of the fullest GPU in GiB, as the driver counts it.",
            example="66.4",
        ),
        "gflop_per_token": Field(
            Number(),
            "Billions of floating-point operations of the model for one token, forward and "
            "backward, with non-causal attention and without recomputation.",
            example="640.2",
        ),
        "peak_tflops": Field(
            Number(), "Peak TFLOP/s of one GPU in the precision of training.", example="312"
        ),
    }
)

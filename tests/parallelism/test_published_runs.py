"""Published runs, converted for the planner."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.diagnostics import UsageError
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import OVERLAPPED, of_family, of_gpu
from dtrain.parallelism.cost.layer import Kernels
from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.model.adapters import Lora
from planner.published.hardware import gpu_of, network_gbps
from planner.published.layouts import SQUAD
from planner.published.rows import UnusableError, rows
from planner.published.runs import PublishedRun, Skipped, read, run_of
from planner.published.sources import origin
from validate_planner import RUNS, outcome_of

PLAIN = {
    "id": "x",
    "source": "a/b docs/c.md row 1",
    "model_name": "GPT 7.5B",
    "layers": "36",
    "hidden": "4096",
    "heads": "32",
    "seq_len": "2048",
    "gpu_type": "A100-80GB",
    "n_gpus": "64",
    "gpus_per_node": "8",
    "tp": "4",
    "pp": "2",
    "micro_batch": "2",
    "global_batch": "128",
    "precision": "bf16",
    "reported_step_time_s": "3.5",
}


def run(**cells: str) -> PublishedRun:
    return run_of({**PLAIN, **cells})


def refused(**cells: str) -> str:
    with pytest.raises(UnusableError) as caught:
        run(**cells)
    return str(caught.value)


def test_blanks_are_filled_in() -> None:
    found = run()
    layout, shape = found.layout, found.shape
    assert (layout.data, layout.grad_accumulation, layout.global_batch) == (8, 8, 128)
    assert (layout.context, layout.expert, layout.virtual_pipeline) == (1, 1, 1)
    assert layout.sharding == "optimizer"
    assert layout.sequence_parallel
    assert found.assumed.flash_attention
    assert layout.recompute == "none"
    assert (shape.kv_heads, shape.ffn_hidden, shape.gated) == (32, 16384, False)
    assert shape.vocab == 50688  # 50257, up to a multiple of 128 · 4
    assert found.cluster.network == 200  # of a DGX A100, in GB/s
    assert found.fitted
    assert found.seconds == 3.5


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"source": "VIA-Research/vTrain data/x.csv row 3"}, ("none", False, False)),
        ({"source": "Megatron-LM SC21 (arXiv 2104.04473) Table 1"}, ("none", False, False)),
        ({"source": "Reducing Activation Recomputation"}, ("none", True, False)),
        ({"source": "pytorch/torchtitan docs/performance.md"}, ("full", True, True)),
        ({"source": "NVIDIA/NeMo docs of 2022"}, ("optimizer", True, False)),
        (
            {"source": "NVIDIA/NeMo docs of 2022", "flash_attention": "yes"},
            ("optimizer", True, True),
        ),
        ({"source": "NVIDIA/NeMo docs", "gpu_type": "H100-80GB"}, ("optimizer", True, True)),
        ({"flash_attention": "no"}, ("optimizer", True, False)),
        ({"notes": "full recompute, no sequence parallelism"}, ("optimizer", False, True)),
    ],
)
def test_a_source_s_software_decides_what_is_blank(
    cells: dict[str, str], said: tuple[str, bool, bool]
) -> None:
    found = run(**cells)
    layout = found.layout
    assert (layout.sharding, layout.sequence_parallel, found.assumed.flash_attention) == said


@pytest.mark.parametrize(
    ("cells", "backend", "sharding", "overlaps"),
    [
        ({}, "megatron", "optimizer", True),
        ({"source": "Our 7B (blog)", "notes": "Megatron-LM v0.9"}, "megatron", "optimizer", True),
        ({"source": "A paper (arXiv 2401.1), LitGPT"}, "torchtitan", "full", True),
        ({"notes": "trained with OLMo-core"}, "torchtitan", "full", True),
        ({"notes": "PyTorch FSDP FULL_SHARD"}, "torchtitan", "full", True),
        ({"sharding": "fsdp"}, "torchtitan", "full", True),
        ({"sharding": "ZeRO-3"}, "torchtitan", "full", True),
        ({"notes": "Megatron-FSDP", "sharding": "fsdp"}, "megatron", "full", True),
        ({"notes": "MaxText"}, "megatron", "full", True),
        ({"source": "NVIDIA/x maxtext/README.md"}, "megatron", "full", True),
        ({"gpu_type": "TPU v4"}, "megatron", "full", True),
        ({"notes": "DeepSpeed 0.5.8"}, "megatron", "none", False),
        ({"notes": "DeepSpeed", "gpu_type": "8xH100-80GB"}, "torchtitan", "full", True),
        ({"notes": "DeepSpeed", "model_name": "LLaMA-7B"}, "torchtitan", "full", True),
        ({"source": "A blog on DeepSpeed", "model_name": "Qwen-7B"}, "torchtitan", "full", True),
        ({"notes": "OpenRLHF", "flash_attention": "yes"}, "torchtitan", "full", True),
        ({"flash_attention": "no", "precision": "fp16"}, "megatron", "none", False),
        ({"flash_attention": "no", "precision": "fp16", "sharding": "zero1"}, "megatron",
         "optimizer", False),
    ],
)  # fmt: skip
def test_the_software_of_an_unknown_source(
    cells: dict[str, str], backend: str, sharding: str, overlaps: bool
) -> None:
    found = run(**cells)
    assert (found.layout.backend, found.layout.sharding) == (backend, sharding)
    assert found.assumed.overlaps_reduction is overlaps


@pytest.mark.parametrize(
    ("cells", "separate"),
    [
        ({}, True),
        ({"notes": "eager"}, True),
        ({"notes": "without torch.compile"}, True),
        ({"notes": "no compile"}, True),
        ({"source": "torchtitan paper, Table 1 torch.compile"}, False),
        ({"id": "8b-compiled"}, False),
        ({"notes": "RMSNorm kernel"}, False),
        ({"notes": "Liger; no compile"}, False),
    ],
)
def test_compilation_fuses_norms(cells: dict[str, str], separate: bool) -> None:
    found = run(**{"source": "torchtitan paper, Table 1", **cells})
    assert found.assumed.separate_kernels is separate


def test_a_run_is_given_if_no_rule_fills_in_its_layout_or_batch() -> None:
    cells = {"sharding": "optimizer", "recompute": "none"}
    assert run(**cells).given
    for missing in ("sharding", "recompute", "micro_batch", "global_batch"):
        # A rate, because a step time needs a batch.
        rate = {"reported_step_time_s": "", "reported_tokens_per_s_per_gpu": "900"}
        assert not run(**{**cells, **rate, missing: ""}).given, missing
    assert not run(**{**cells, "tp": "", "pp": ""}).given
    assert run(**{**cells, "tp": "", "pp": "", "sharding": "FSDP"}).given
    # One sequence for each data rank leaves one micro-batch.
    assert run(**{**cells, "micro_batch": "", "global_batch": "8"}).given
    mixture = {**cells, "moe_experts": "8", "moe_topk": "2"}
    assert not run(**mixture).given
    assert run(**mixture, ep="8").given


def test_blank_cells_are_what_a_run_needs_to_fit() -> None:
    """20 bytes a parameter of 7.5 billion on one GPU, or 32 sequences without recomputation."""
    early = {"flash_attention": "no", "precision": "fp16", "tp": "1", "pp": "1"}
    assert run(**early).layout.sharding == "optimizer"
    assert run(**early, sharding="none").layout.sharding == "none"
    large = {"micro_batch": "16", "tp": "1", "pp": "1", "global_batch": "1024"}
    assert run(**large).layout.recompute == "full"
    assert run(**large, recompute="none").layout.recompute == "none"
    # Whether it did fit is what the planner is tested on.
    assert run(**large, notes="OOM").layout.recompute == "full"


def test_sharded_parameters_are_gathered_once_in_a_step_if_its_parts_are_not_given() -> None:
    cells = {"tp": "", "pp": "", "micro_batch": "", "sharding": "FSDP", "global_batch": "256"}
    assert run(**cells).layout.micro_batch == 4
    assert run(**cells, notes="mbs 2").layout.grad_accumulation == 2
    # Longer micro-batches would not fit.
    large = run(**{**cells, "seq_len": "16384"}, recompute="none").layout
    assert (large.micro_batch, large.grad_accumulation) == (1, 4)
    # Megatron-LM's users choose the micro-batch.
    assert run(**cells, notes="Megatron-LM").layout.micro_batch == 1


def test_fsdp_that_keeps_what_it_gathered() -> None:
    cells = {"tp": "", "pp": "", "sharding": "SHARD_GRAD_OP", "notes": "FSDP2; gathered in fp8"}
    found = run(**cells)
    assert found.layout.sharding == "full"
    assert found.assumed.habits.keeps_gathered
    assert found.assumed.habits.gathers_fp8
    # DeepSpeed's ZeRO-2 has whole parameters.
    assert run(tp="", pp="", sharding="zero2", notes="DeepSpeed").layout.sharding == "gradients"


def test_adapters_whose_kernel_overwrites_the_mlp_need_less_memory() -> None:
    cells = {"source": "Axolotl [LoRA]", "tp": "", "pp": "", "n_gpus": "1", "dp": "",
             "model_name": "Llama-3.2-1B", "layers": "", "hidden": "", "heads": "",
             "recompute": "full", "micro_batch": "16", "global_batch": "16"}  # fmt: skip
    plain, fused = (
        outcome_of(run(**cells, reported_peak_mem_gb="20", notes=notes))
        for notes in (
            "LoRA rank 16 on all matrices",
            "LoRA rank 16 on all matrices; fused kernels of LoRA",
        )
    )
    # Of 16 sequences' MLP: the last product's input, and the gradients of the gate's tensors.
    assert 0.8 < (plain.gib - fused.gib) / (3 * 2 * 8192 * 16 * 2048 / 2**30) < 1.1


def test_mingpt_keeps_the_terms_of_its_gelu() -> None:
    cells = {"tp": "", "pp": "", "recompute": "none", "sharding": "FSDP", "micro_batch": "1",
             "global_batch": "64", "reported_peak_mem_gb": "70"}  # fmt: skip
    plain, terms = (outcome_of(run(**cells, notes=notes)).gib for notes in ("FSDP", "FSDP; minGPT"))
    expected = 14 * 4 * 4096 * 36 * 2048 / 2**30
    assert terms - plain == pytest.approx(expected, rel=0.1)


def test_sequence_parallelism_that_is_off() -> None:
    assert run().layout.sequence_parallel
    assert not run(notes="TRL").layout.sequence_parallel
    assert not run(notes="untied; sequence parallelism off").layout.sequence_parallel


@pytest.mark.parametrize(
    ("notes", "lora"),
    [
        ("", Lora(16, "attention")),
        ("LoRA rank 8 on queries and values", Lora(8, "attention")),
        ("LoRA rank 64 on all matrices", Lora(64)),
        ("LoRA rank 16 on all linear layers of attention", Lora(16, "attention")),
        ("LoRA rank 8 on the MLP; frozen matrices in 4 bits (nf4)", Lora(8, base_bits=4)),
    ],
)
def test_adapters(notes: str, lora: Lora) -> None:
    assert run(id="x-lora", notes=notes).shape.lora == lora
    assert run(notes=notes).shape.lora is None


@pytest.mark.parametrize(
    ("source", "notes", "copies", "output"),
    [
        (
            "PEFT",
            "LoRA rank 16 on queries, keys, values and output; dropout of their inputs",
            3,
            True,
        ),
        ("PEFT", "LoRA rank 8 on queries, keys and values; dropout of their inputs", 3, False),
        ("PEFT", "LoRA rank 8 on queries and values; dropout of their inputs", 2, False),
        ("LitGPT", "LoRA rank 8 on queries and values; dropout of their inputs", 1, False),
        ("LitGPT", "LoRA rank 8 on all matrices; dropout of their inputs", 1, True),
        ("LitGPT", "LoRA rank 8 on all matrices", 0, False),
    ],
)
def test_adapters_with_dropout(source: str, notes: str, copies: int, output: bool) -> None:
    lora = run(source=f"{source} table", id="x-lora", notes=notes).shape.lora
    assert lora is not None
    assert (lora.dropout, lora.output_dropout) == (copies, output)


@pytest.mark.parametrize(
    ("notes", "chunks"),
    [
        ("loss in 4 chunks", 4),
        ("fused cross-entropy (Liger kernels)", -(-50688 // 4096)),
        ("", 1),
    ],
)
def test_parts_of_the_loss(notes: str, chunks: int) -> None:
    assert run(notes=notes).assumed.loss_chunks == chunks


def test_flagscale_has_the_kernels_of_an_old_megatron_lm() -> None:
    source = "FlagOpen/FlagPerf training/nvidia/aquila2_7b-flagscale/README.md"
    habits = run(source=source).assumed.habits
    assert (habits.fused_gate, habits.repeats_keys) == (False, True)


def test_flagperf_s_megatron_copies_logits_and_drops_hidden_states() -> None:
    """Llama 3 8B with tensor 2 took 71 GiB on 8 H100s. Logits take 10 bytes each, not 6."""
    cells = {"model_name": "Llama-3-8B", "layers": "", "hidden": "", "heads": "", "tp": "2",
             "pp": "1", "n_gpus": "8", "seq_len": "8192", "gpu_type": "H100-80GB"}  # fmt: skip
    source = "FlagOpen/FlagPerf training/nvidia/llama3_8B-megatron/README.md"
    flagperf, other = (
        run(**cells, source=one, notes=notes)
        for one, notes in ((source, "hidden dropout"), ("a/b docs/c.md", "Megatron-LM"))
    )
    logits = [one.candidate(of_family("hopper")).memory.logits for one in (flagperf, other)]
    assert logits[0] == pytest.approx(10 / 6 * logits[1])
    assert (flagperf.shape.dropout, other.shape.dropout) == (True, False)


@pytest.mark.parametrize(
    ("notes", "work", "apart"),
    [
        ("DeepSpeed ZeRO-3, PEFT", True, False),
        ("DeepSpeed ZeRO-2, PEFT; frozen matrices in 4 bits (GPTQ)", False, True),
        ("PEFT; frozen matrices in 4 bits", False, False),
    ],
)
def test_what_the_host_and_4_bits_take(notes: str, work: bool, apart: bool) -> None:
    found = run(model_name="Llama-2-7B", tp="1", pp="1", n_gpus="1", notes=notes).assumed
    assert (found.host_work > 0, found.separate_expansion) == (work, apart)


@pytest.mark.parametrize(
    ("cells", "backend"),
    [
        ({"precision": "bf16-true"}, "torchtitan"),
        ({"precision": "bf16-true", "notes": "Megatron-LM"}, "megatron"),
        ({"source": "modelscope/ms-swift docs/a.md"}, "torchtitan"),
        ({}, "torchtitan"),
    ],
)
def test_states_of_16_bits_are_those_of_modules(cells: dict[str, str], backend: str) -> None:
    found = run(**cells, n_gpus="1", tp="1", pp="1")
    assert (found.layout.backend, found.layout.world_size) == (backend, 1)
    assert found.assumed.narrow_states is ("precision" in cells)
    assert found.assumed.unfused(found.layout) is ("Megatron" not in cells.get("notes", ""))


def test_tokens_go_to_a_host_once_or_to_each_expert() -> None:
    moe = {"moe_experts": "16", "moe_topk": "8", "ffn_hidden": "1024", "tp": "1", "pp": "1"}
    times = [
        run(**moe, ep="16", notes=f"Megatron-LM; {dispatcher}").candidate(of_family("ampere")).time
        for dispatcher in ("DeepEP", "all-to-all dispatcher")
    ]
    assert times[1].expert > 1.5 * times[0].expert > 0


def test_a_run_without_a_split_has_the_one_that_it_needs_to_fit() -> None:
    """13 billion parameters with sharded states need 2 tensor ranks on 80 GB GPUs."""
    blank = {"tp": "", "pp": "", "layers": "40", "hidden": "5120", "heads": "40"}
    found = run(**blank, notes="Megatron-LM")
    assert (found.layout.tensor, found.layout.data, found.layout.recompute) == (2, 32, "none")
    assert run(**blank, sharding="fsdp").layout.tensor == 1
    assert run(**{**blank, "tp": "1"}, notes="Megatron-LM").layout.tensor == 1


def test_a_run_whose_recomputation_is_not_given_fits_if_one_kind_does() -> None:
    """Megatron-LM can recompute some layers only, so an estimate of 10 % too much is no refusal."""
    efficiency = of_family("ampere")
    large = {
        "micro_batch": "4",
        "tp": "1",
        "pp": "1",
        "global_batch": "256",
        "notes": "Megatron-LM",
    }
    found = run(**large)
    assert found.layout.recompute == "none"
    assert not found.candidate(efficiency).fits
    assert found.fits(efficiency)
    assert not run(**large, recompute="none").fits(efficiency)


@pytest.mark.parametrize(
    ("recompute", "notes", "fits"),
    [
        ("selective", "", False),
        ("selective (layernorm, moe)", "", True),
        ("selective", "selective AC = checkpointing of some blocks", True),
        ("selective", "recomputes ffn, norm", True),
    ],
)
def test_a_run_that_recomputes_some_layers_fits_if_full_recomputation_does(
    recompute: str, notes: str, fits: bool
) -> None:
    large = {"micro_batch": "8", "tp": "1", "pp": "1", "global_batch": "1024"}
    assert run(**large, recompute=recompute, notes=notes).fits(of_family("ampere")) is fits


def test_a_run_that_never_fits_saves_the_most() -> None:
    assert run(tp="1", pp="1", seq_len="131072").layout.recompute == "full"


@pytest.mark.parametrize(
    ("written", "sharding"),
    [
        ("none", "none"),
        ("DDP", "none"),
        ("zero1", "optimizer"),
        ("distributed optimizer", "optimizer"),
        ("ZeRO-2", "gradients"),
        ("SHARD_GRAD_OP", "gradients"),
        ("zero-3", "full"),
        ("fsdp", "full"),
        ("FULL_SHARD", "full"),
        ("HSDP", "hybrid"),
    ],
)
def test_sharding_names(written: str, sharding: str) -> None:
    assert run(sharding=written).layout.sharding == sharding


def test_the_shard_group_of_the_notes() -> None:
    assert run(sharding="zero1", notes="ZeRO-1 shard group: 4; x").layout.shard == 4
    assert run(sharding="zero1", notes="ZeRO-1 shard group: all DP; x").layout.shard is None


@pytest.mark.parametrize(
    ("written", "precision"),
    [
        ("bf16 (FSDP2, fp32 params/reduce default)", "bf16"),
        ("amp_bf16 (DEFAULT)", "bf16"),
        ("fp16 mixed", "fp16"),
        ("tf32", "tf32"),
        ("", "bf16"),
    ],
)
def test_precisions(written: str, precision: str) -> None:
    assert run(precision=written).assumed.precision == precision


def test_notes_name_the_precision_that_the_cell_does_not() -> None:
    fast = {"gpu_type": "H100-80GB", "precision": ""}
    assert run(**fast, notes="pre-training, FP8; MODEL TFLOPs").assumed.precision == "fp8"
    assert run(**fast, notes="fp32 master weights").assumed.precision == "bf16"
    assert run(gpu_type="H100-80GB", notes="FP8 was slower").assumed.precision == "bf16"


def test_gradients_are_reduced_in_16_bits_if_the_source_does_it() -> None:
    assert not run(precision="bf16 (PURE)").assumed.fp32_gradients
    assert not run(precision="fp16 mixed").assumed.fp32_gradients
    assert run(precision="bf16").assumed.fp32_gradients
    bridge = run(source="NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md row 1")
    assert not bridge.assumed.fp32_gradients


def test_the_notes_say_in_how_many_bits_gradients_are_reduced() -> None:
    bridge = run(
        source="NVIDIA-NeMo/Megatron-Bridge", notes="gradients are reduced in fp32 (recipe)"
    )
    assert bridge.assumed.fp32_gradients
    assert not run(sharding="FSDP", notes="gradients are reduced in bf16").assumed.fp32_gradients


@pytest.mark.parametrize(
    ("notes", "moments", "master"),
    [
        ("", 4, 4),
        ("16 bits of master weights; Adam's moments in bf16", 2, 2),
        ("Adam's moments in fp8, no master weights", 1, 0),
        ("Adafactor", 0, 4),
    ],
)
def test_the_optimizer_of_the_notes(notes: str, moments: float, master: float) -> None:
    habits = run(notes=notes).assumed.habits
    assert (habits.moment_bytes, habits.master_bytes) == (moments, master)


@pytest.mark.parametrize(
    ("written", "recompute"),
    [("full", "full"), ("uniform", "full"), ("yes", "full"), ("selective", "selective"),
     ("per-op", "selective"), ("no", "none"), ("", "none")],
)  # fmt: skip
def test_recomputation(written: str, recompute: str) -> None:
    assert run(recompute=written).layout.recompute == recompute


@pytest.mark.parametrize("said", ["--recompute-activations", "selective means core_attn"])
def test_selective_recomputation_of_the_core_of_attention_alone(said: str) -> None:
    mixture = {"model_name": "Mixtral-8x7B", "global_batch": "512", "recompute": "selective"}
    for notes, modules in (("", True), (f"; {said}", False)):
        found = run(**mixture, notes=f"Megatron-LM{notes}")
        assert found.layout.recompute == "selective"
        assert found.assumed.recomputes_modules(found.shape, found.layout) == modules


@pytest.mark.parametrize(
    ("notes", "chunks"), [("chunks of a stage not stated", 18), ("chunks not stated", 18), ("", 1)]
)
def test_a_pipeline_whose_chunks_are_not_stated_has_one_for_each_layer(
    notes: str, chunks: int
) -> None:
    assert run(notes=f"Megatron-LM; {notes}").layout.virtual_pipeline == chunks


@pytest.mark.parametrize(
    ("written", "gbps"),
    [
        ("1600 Gb/s RoCE per node", 1600),
        ("NVSwitch; 800Gb/s per node", 800),
        ("4x100Gb/s RoCE per node", 400),
        ("NVSwitch intra; 8x200Gb/s HDR InfiniBand per node", 1600),
        ("NVLink; 400Gb/s RDMA per GPU", 3200),
        ("NVLink 600 GB/s; 3.2 Tb/s EFA", 3200),
        ("100 Gbps Ethernet", 100),
        ("HDR InfiniBand 200Gb/s", 1600),
        ("25 GB/s per node", 200),
        ("1,600 Gb/s per node", 1600),
        ("8x400G NDR", 3200),
        ("InfiniBand NDR", 3200),
        ("NVLink; 4x HDR100", 400),
        ("DGX H100", 3200),
        ("p4d.24xlarge", 400),
        ("NVLink; RoCE RDMA", None),
        ("single node", None),
        ("", None),
    ],
)
def test_networks(written: str, gbps: float | None) -> None:
    assert network_gbps(written, 8) == gbps


def test_omni_path_sustains_less_than_infiniband() -> None:
    network = run(interconnect="4x100Gb/s Omni-Path per node").cluster.network
    assert 8 * network * of_family("ampere").network == pytest.approx(135)


@pytest.mark.parametrize(
    ("written", "interconnect", "name"),
    [
        ("A100", "", "a100-80gb"),
        ("H100 (95GB)", "", "h100-96gb"),
        ("A100-PCIe", "", "a100-pcie-80gb"),
        ("A100 PCIe 80GB", "", "a100-pcie-80gb"),
        ("A100-80GB", "PCIe 4.0 x16", "a100-pcie-80gb"),
        ("A100-80GB", "NVLink; PCIe switches", "a100-80gb"),
        ("A100 (40GB)", "", "a100-40gb"),
        ("A100-64GB", "", "a100-64gb"),
        ("H100 64GB", "", "h100-64gb"),
        ("H100 SXM5 80GB", "", "h100-80gb"),
        ("GB200 NVL72", "", "gb200"),
        ("NVIDIA B200 SXM 180GB", "", "b200"),
        ("MI300X", "", "mi300x"),
        ("8xH100", "", "h100-80gb"),
    ],
)
def test_gpus(written: str, interconnect: str, name: str) -> None:
    assert gpu_of(written, interconnect).name == name


@pytest.mark.parametrize(
    ("source", "publisher", "table"),
    [
        ("Megatron-LM SC21 (arXiv 2104.04473) Table 1; more", "Megatron-LM SC21", ""),
        ("o/r data/g_multi.csv row 12", "o/r", "o/r g_multi"),
        ("o/r docs/README.md [A100 40GB with 1600 Gbps (x)]", "o/r", "o/r A100 40GB"),
        ("o/r llama/README.md @35a9aec", "o/r", "o/r llama"),
        ("o/r doc/t.md @c62 GPU memory table", "o/r", "o/r t GPU memory table"),
        ("", "unnamed", ""),
    ],
)
def test_origins(source: str, publisher: str, table: str) -> None:
    assert origin(source) == (publisher, table or publisher)


def test_every_figure_gives_the_same_time() -> None:
    """A step of 2 s, given by each of the figures."""
    made = run(reported_step_time_s="2", precision="bf16")
    tokens = 128 * 2048 / 64 / 2
    tflops = tokens * flop_per_token(made.shape) / 1e12
    causal = tokens * flop_per_token(made.shape, causal=True) / 1e12
    blank = {"reported_step_time_s": ""}
    ways = [
        {"reported_tokens_per_s_per_gpu": f"{tokens}"},
        {"reported_tflops_per_gpu": f"{tflops}"},
        {"reported_mfu_pct": f"{100 * tflops / 312}"},
        {"reported_mfu_pct": f"{100 * causal / 312}", "notes": "MFU with causal attention"},
        {"reported_mfu_pct": f"{100 * tflops / 312}", "notes": "NON-causal attention"},
        {"reported_hfu_pct": f"{100 * tflops / 312}"},
    ]
    for way in ways:
        seconds = run(**{**blank, **way}).seconds
        assert seconds is not None
        assert math.isclose(seconds, 2, rel_tol=1e-9), way


def test_hardware_flop_count_recomputation() -> None:
    """SC21 eq. 3: 96·B·s·L·h²(1 + s/(6h) + V/(16·L·h))."""
    seconds = run(
        reported_step_time_s="",
        reported_tflops_per_gpu="140",
        recompute="full",
        vocab="51200",
        notes="TFLOPs = HARDWARE FLOPs",
    ).seconds
    batch, s, layers, h, vocab = 128, 2048, 36, 4096, 51200
    flop = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert seconds == pytest.approx(flop / 64 / 140e12, rel=1e-3)


def test_a_batch_from_the_notes() -> None:
    found = run(global_batch="", notes="real run; mbc=4 microbatches; GiB allocated")
    assert found.layout.grad_accumulation == 4
    assert found.counter == "allocated"
    reason = refused(global_batch="")
    assert reason == "the global batch of a step time is not given"
    rate = {"reported_step_time_s": "", "reported_tokens_per_s_per_gpu": "1000"}
    assert run(global_batch="", **rate).seconds is not None


def test_the_peak_of_the_notes_is_more_exact_than_the_column() -> None:
    notes = "peak allocated 45800 MiB, reserved 46498 MiB (column = allocated in GB)"
    found = run(reported_peak_mem_gb="48.02", notes=notes)
    assert (found.counter, found.memory) == ("allocated", pytest.approx(45800 / 1024))


@pytest.mark.parametrize(
    ("notes", "counter"),
    [
        ("peak of torch.cuda.max_memory_allocated()", "allocated"),
        ("max_memory_reserved in GiB", "reserved"),
        ("GiB reserved by the allocator", "reserved"),
        ("nvidia-smi", "total"),
        ("unallocated", "total"),
    ],
)
def test_the_counter_of_a_peak(notes: str, counter: str) -> None:
    assert run(reported_peak_mem_gb="40", notes=notes).counter == counter


@pytest.mark.parametrize(
    ("notes", "gpu", "fitted"),
    [
        ("OOM; selective AC", "A100-80GB", False),
        ("did not go OOM", "A100-80GB", True),
        ("memory ended at iteration 14", "A100-80GB", False),
        ("", "A100", None),
        ("GPU memory size and precision not stated", "A100-80GB", None),
        ("OOM; remat not stated", "A100-80GB", None),
        ("recomputation not stated", "A100-80GB", None),
        ("optimizer states offload: master; parameters on the host", "A100-80GB", None),
    ],
)
def test_labels(notes: str, gpu: str, fitted: bool | None) -> None:
    assert run(notes=notes, gpu_type=gpu).fitted is fitted


def test_models_by_name() -> None:
    proxy = run(
        model_name="Llama-3-70B (12-layer proxy)", layers="12", hidden="", heads="", seq_len=""
    )
    assert (proxy.shape.layers, proxy.shape.hidden, proxy.shape.kv_heads) == (12, 8192, 8)
    # Megatron-LM pads 128256 to a multiple of 128 · 4.
    assert (proxy.shape.vocab, proxy.shape.gated) == (128512, True)
    mixture = run(model_name="Mixtral-8x7B", layers="32", ep="8").shape
    assert (mixture.experts, mixture.experts_per_token) == (8, 2)
    # Not a Llama 3.
    assert run(model_name="LLaMA-34B", n_gpus="8", pp="1").shape.vocab == 32256
    latent = run(model_name="DeepSeek-V3", layers="4", hidden="7168", heads="128").shape
    assert latent.kv_rank == 512
    assert latent.dense_layers < 4


def test_hugging_face_has_zero_from_deepspeed() -> None:
    zero, fsdp = (run(notes="ms-swift", sharding=one).assumed for one in ("ZeRO-3", "fsdp"))
    assert (zero.fp32_gradients, fsdp.fp32_gradients) == (False, True)
    assert zero.habits.fused_adam


@pytest.mark.parametrize(
    ("cells", "balanced"),
    [
        ({"notes": "Megatron-LM"}, False),
        ({"notes": "Megatron-LM; forced load balancing"}, True),
        ({"notes": "Megatron of Primus; even routing"}, True),
        ({"source": "NVIDIA-NeMo/Megatron-Bridge docs/a.md"}, True),
    ],
)
def test_benchmarks_force_the_balance_of_experts(cells: dict[str, str], balanced: bool) -> None:
    assert (run(**cells).assumed.uneven == 0) is balanced


def test_gpt_has_dropout_unless_its_row_says_otherwise() -> None:
    assert run(model_name="GPT-2").shape.dropout
    assert not run(model_name="GPT-2", notes="no dropout").shape.dropout


def test_tokens_are_exchanged_beside_computation_in_dualpipe() -> None:
    cells = {"model_name": "DeepSeek-V3", "layers": "", "hidden": "", "heads": "", "ffn_hidden": ""}
    mixture = {**cells, "gpu_type": "H800", "n_gpus": "2048", "tp": "1", "pp": "16", "ep": "64",
               "micro_batch": "1", "global_batch": "15360"}  # fmt: skip
    shown, hidden = run(**mixture), run(**mixture, notes="schedule DualPipe")
    assert (shown.layout.schedule, hidden.layout.schedule) == ("1f1b", "zb-1p")
    efficiency = of_family("hopper")
    times = [one.candidate(efficiency).time for one in (shown, hidden)]
    assert times[1].expert == pytest.approx(OVERLAPPED * times[0].expert)
    assert run(**mixture, source="DeepSeek-V3 (arXiv 2412.19437)").assumed.hides_exchange


def test_fine_tuning_on_packed_examples_has_little_attention() -> None:
    tuned = {"model_name": "Llama-3-8B SFT", "gpu_type": "H100-80GB", "seq_len": "4096"}
    cells = {**tuned, "layers": "32", "hidden": "4096", "heads": "32", "tp": "1", "pp": "1"}
    bridge = run(**cells, source="NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md")
    nemo = run(**cells, source="NVIDIA/NeMo docs/performance_summary.md")
    assert (bridge.assumed.document, nemo.assumed.document) == (0, SQUAD)
    assert run(**cells, source="A blog", notes="packed SQuAD").assumed.document == SQUAD
    assert run(source="NVIDIA/NeMo docs", gpu_type="H100-80GB").assumed.document == 0
    efficiency = of_family("hopper")
    whole, packed = (
        Kernels(efficiency, one.cluster, one.shape, one.layout, one.assumed).attention_forward
        for one in (bridge, nemo)
    )
    assert packed == pytest.approx(whole * SQUAD / 4096)


def test_parallel_blocks_of_the_model_or_of_the_notes() -> None:
    assert not run().shape.parallel
    assert run(notes="MegaScale; parallel transformer block + overlap").shape.parallel
    assert run(model_name="Falcon-180B", layers="", hidden="", heads="", n_gpus="8").shape.parallel


@pytest.mark.parametrize(("printed", "tied"), [("1.5", True), ("1.7", False), ("", True)])
def test_the_printed_size_decides_whether_the_embedding_is_shared(printed: str, tied: bool) -> None:
    sizes = {"layers": "24", "hidden": "2048", "heads": "16", "vocab": "131072"}
    assert run(model_name="GPT", params_b=printed, **sizes).shape.tied is tied


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu_type": "abacus"}, "the GPU is not known: abacus"),
        ({"layers": ""}, "the model's shape is not given"),
        ({"layers": "123456"}, "the model's shape is not possible"),
        ({"tp": "7"}, "the GPUs do not divide by the split"),
        ({"pp": "64", "tp": "1"}, "the pipeline has more stages than the model has layers"),
        ({"global_batch": "4"}, "the global batch has fewer sequences than data ranks"),
        ({"precision": "fp8"}, "a100-80gb does not support fp8"),
        ({"precision": "mxfp4"}, "the precision is not known: mxfp4"),
        ({"notes": "schedule V-Half; x"}, "the planner has no schedule V-Half"),
        ({"reported_step_time_s": ""}, "nothing is reported"),
    ],
)
def test_reasons(cells: dict[str, str], reason: str) -> None:
    assert refused(**cells) == reason


def test_every_row_of_the_shared_files_is_usable() -> None:
    found = [run for path in RUNS for run in read(path)]
    skipped = Counter(run.reason for run in found if isinstance(run, Skipped))
    assert len(found) == 1431
    assert skipped == {
        "the model's shape is not given": 28,
    }


ROWS = rows(RUNS[0])
CELLS = {column: sorted({row[column] for row in ROWS}) for column in ROWS[0]}
WILD = st.sampled_from(["", "0", "-1", "nan", "1e99", "∞", "999999999", "8x", "OOM", "zero3", "64"])


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {column: st.one_of(st.sampled_from(cells), WILD) for column, cells in CELLS.items()}
    )
)
def test_any_row_is_read_or_refused(row: dict[str, str]) -> None:
    try:
        found = run_of(row)
    except UnusableError as error:
        assert str(error)
        return
    assert not isinstance(outcome_of(found), Skipped)


def test_files_with_other_tables(tmp_path: Path) -> None:
    for text in ("", "a,b\n1,2\n", "\x00\xff"):
        path = tmp_path / "x.csv"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(UsageError):
            rows(path)
    path.write_text("source,gpu_type\na,b\n" + "x" * (1 << 18))
    with pytest.raises(UsageError, match=r"x\.csv:3: field larger"):
        rows(path)
    with pytest.raises(UsageError):
        rows(tmp_path / "missing.csv")
    with pytest.raises(UsageError):
        rows(tmp_path)


def test_experts_of_a_row_are_whole_unless_its_software_splits_them() -> None:
    mixture = {"model_name": "Qwen3-235B-A22B", "gpu_type": "H100-80GB", "n_gpus": "256"}
    split = {**mixture, "tp": "2", "pp": "8", "ep": "8", "global_batch": "2048"}
    modern = run(**split, source="Megatron-LM")
    assert modern.layout.expert == 4  # of two tensor ranks each
    assert modern.assumed.whole_experts
    for cells in ({"source": "NVIDIA/NeMo"}, {"source": "Megatron-LM", "notes": "ETP 2"}):
        parts = run(**split, **cells)
        assert parts.layout.expert == 8
        assert not parts.assumed.whole_experts
    # 32 x 2 x 8 are more than 256.
    assert run(**{**split, "ep": "32"}, source="NVIDIA/NeMo").assumed.whole_experts


def test_the_dispatcher_that_a_row_names() -> None:
    row = {"model_name": "Qwen3-235B-A22B", "gpu_type": "H100-80GB", "n_gpus": "256", "ep": "8"}
    for notes, copies in (("DeepEP", False), ("all-to-all dispatcher", True), ("", None)):
        assert run(**row, global_batch="2048", notes=notes).assumed.sends_copies is copies


def test_the_host_does_not_wait_for_tokens_of_padded_experts() -> None:
    cells = {"source": "Megatron-LM", "model_name": "Mixtral-8x7B", "ep": "8"}
    waits = []
    for notes in ("experts padded to capacity factor 1", ""):
        found = run(**cells, notes=notes)
        waits.append(found.candidate(of_gpu(found.cluster.gpu)).time.host)
    padded, dropless = waits
    assert padded == 0 < dropless
    found = run(**{**cells, "source": "MaxText"}, notes="experts padded to capacity factor 1.25")
    assert found.assumed.capacity == 1.25 and found.assumed.masks_experts
    assert not found.assumed.room_for_all
    found = run(**{**cells, "source": "MaxText"}, notes="dropless experts, ragged all-to-all")
    assert found.assumed.room_for_all


def test_torchtitan_without_fsdp_trains_in_32_bits() -> None:
    cells = {
        "source": "torchtitan",
        "model_name": "Llama-3-8B",
        "gpu_type": "H200",
        "tp": "8",
        "pp": "1",
    }
    alone = run(**cells, n_gpus="8", precision="bf16")
    assert alone.assumed.precision == "fp32"
    assert run(**cells, n_gpus="16", precision="bf16").assumed.precision == "bf16"
    assert alone.layout.recompute == "selective"


def test_a_row_names_the_modules_that_it_recomputes() -> None:
    for cell, several in (("selective (norms, GELU)", True), ("selective", None)):
        assert (
            run(notes="Megatron-LM", recompute=cell).assumed.habits.recomputes_activation is several
        )
    apart = run(notes="FSDP2; attention and MLP are recomputed apart", recompute="full")
    assert apart.assumed.habits.recomputes_parts


def test_the_sizes_of_heads_and_of_dense_layers_in_the_notes() -> None:
    cells = {"model_name": "New 295B", "layers": "80", "hidden": "4096", "heads": "64"}
    experts = {"kv_heads": "8", "ffn_hidden": "1536", "moe_experts": "192", "moe_topk": "8"}
    notes = "1 shared expert; head size 128; 1 dense layer of 13312; untied embeddings"
    found = run(**cells, **experts, vocab="120832", notes=notes)
    assert found.shape.parameters == pytest.approx(295e9, rel=0.002)


@pytest.mark.parametrize(
    ("notes", "flash2"),
    [("flash attention 2", True), ("FlashAttention-3", False), ("flash attn v2", True), ("", None)],
)
def test_the_version_of_flash_attention_in_the_notes(notes: str, flash2: bool | None) -> None:
    assert run(notes=f"Megatron-LM; {notes}").assumed.flash2 is flash2


def test_the_version_of_flash_attention_of_the_software() -> None:
    assert run(notes="Megatron-LM").assumed.flash2 is None
    assert run().assumed.flash2  # of no known software


def test_a_host_may_wait_for_each_kernel() -> None:
    assert run(notes="x; CUDA_LAUNCH_BLOCKING=1; y").assumed.blocking
    assert not run(notes="CUDA_LAUNCH_BLOCKING=0").assumed.blocking


def test_one_graph_may_have_the_whole_step() -> None:
    for notes in ("CUDA graph of the whole step", "the whole iteration as a CUDA graph"):
        assert run(notes=notes).assumed.one_graph
    assert not run(notes="CUDA graphs of attention").assumed.one_graph


def test_recent_recipes_of_megatron_bridge_have_one_graph_of_a_step_with_experts() -> None:
    def assumed(release: str, **cells: str) -> Assumptions:
        source = f"NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md [{release} NeMo]"
        mixture = {"model_name": "Qwen3_30B_A3B", "layers": "", "hidden": "", "heads": ""}
        sizes = {"tp": "1", "pp": "1", "ep": "8", "n_gpus": "8", "precision": "MXFP8"}
        return run(**{**mixture, **sizes, "gpu_type": "GB200", "source": source, **cells}).assumed

    for graphed in (assumed("26.06"), assumed("26.06.01")):
        assert graphed.one_graph and graphed.hides_exchange
    others = (
        assumed("26.04"),
        assumed("26.06", ep="1"),
        assumed("26.06", precision="BF16"),
        assumed("26.06", gpu_type="B200"),
        assumed("26.06", model_name="Nemotron_3_Nano"),
        assumed("26.06", notes="recompute DERIVED from the recipe of the release"),
    )
    for other in others:
        assert not other.one_graph and not other.hides_exchange


def test_recipes_of_megatron_bridge_predict_further_tokens() -> None:
    def layers(**cells: str) -> int:
        bare = {"layers": "", "hidden": "", "heads": "", "tp": "1", "pp": "1", "ep": "64"}
        return run(**{**bare, "model_name": "DeepSeekV3", **cells}).shape.layers

    source = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md [26.08 NeMo]"
    assert layers(source=source) == 62
    assert layers(source=source, notes="no MTP") == layers(source=source, id="sft-x") == 61
    assert layers() == 61
    assert layers(notes="with MTP") == 62
    assert layers(notes="MTP 2") == 63


def test_only_nvidia_s_own_benchmarks_hide_tensor_traffic() -> None:
    assert run(source="NVIDIA/Megatron-LM README").assumed.hides_tensor
    assert not run(source="a/b training/nvidia/x.md", notes="Megatron-LM").assumed.hides_tensor


def test_software_of_no_known_name_has_the_kernels_of_pytorch() -> None:
    assert run().assumed.separate_kernels
    assert not run().assumed.fuses_gradients
    assert not run(notes="Megatron-LM").assumed.separate_kernels


def test_megatron_deepspeed_with_flash_attention_is_of_2023() -> None:
    """Its optimizer for bf16 shards its states at every ZeRO stage."""
    cells = {"notes": "Megatron-DeepSpeed", "sharding": "none", "precision": ""}
    old = run(**cells, flash_attention="no")
    assert (old.assumed.precision, old.layout.sharding, old.assumed.idle) == ("fp16", "none", 0.011)
    new = run(**cells, flash_attention="yes")
    assert (new.assumed.precision, new.assumed.idle, new.assumed.flash2) == ("bf16", 0, True)
    sharded = run(**{**cells, "precision": "bf16"}, flash_attention="yes")
    assert sharded.layout.sharding == "optimizer"
    halves = run(**{**cells, "precision": "fp16"}, flash_attention="yes")
    assert halves.layout.sharding == "none"


@pytest.mark.parametrize(("stage", "wide"), [("none", True), ("ZeRO-1", False)])
def test_deepspeed_sums_gradients_in_16_bits_at_a_zero_stage(stage: str, wide: bool) -> None:
    """Llama 2 7B at stage 1 took 63 GiB of 80 (FlagPerf). It would not fit with 32-bit sums."""
    new = run(notes="Megatron-DeepSpeed", sharding=stage, flash_attention="yes")
    assert new.assumed.fp32_gradients is wide
    assert new.layout.sharding == "optimizer"


def test_deepspeed_copies_all_gradients_in_the_step_unless_it_shards_parameters() -> None:
    def copies(sharding: str) -> float:
        cells = {"notes": "DeepSpeed; Hugging Face", "flash_attention": "yes"}
        return run(**cells, sharding=sharding).assumed.step_copies

    assert [copies(sharding) for sharding in ("zero1", "ZeRO-2", "ZeRO-3", "FSDP")] == [6, 6, 0, 0]


@pytest.mark.parametrize(
    ("name", "notes", "each"),
    [
        ("fms-santacoder-full-none-bf16-1g-b4", "", 8),
        ("fms-santacoder-full-foak-bf16-1g-b4", "Triton kernels for loss", 6),
        ("fms-santacoder-lora-bnb-bf16-amp-1g-b4", "", 18),
        ("fms-santacoder-lora-foak-bf16-amp-1g-b4", "Triton kernels for loss", 14),
        ("fms-mistral-7b-lora-foak-bf16-1g-b4", "Triton kernels for loss", 8),
    ],
)
def test_logits_of_16_bits_are_cast_only_by_autocast(name: str, notes: str, each: float) -> None:
    assert run(id=name, notes=notes).assumed.loss_bytes == each


def test_matrices_in_fp8_replace_those_of_16_bits_that_are_on_the_host() -> None:
    cells = {"source": "IST-DASLab/llmq benchmarks/L40S.md", "gpu_type": "L40S", "precision": "fp8"}
    assert run(**cells).assumed.quantized == 0
    assert run(**cells, notes="optimizer states offload: master, opt-m").assumed.quantized == -1


def test_the_shared_experts_of_the_notes() -> None:
    cells = {"model_name": "Mixtral-8x7B", "layers": "32", "ep": "8"}
    plain, shared = run(**cells).shape, run(**cells, notes="2 shared experts").shape
    assert plain.shared_experts == 0
    assert shared.shared_experts == 2


def test_thunder_s_benchmark_does_not_cast_logits() -> None:
    litgpt = "LitGPT's models"
    assert run(notes=litgpt).assumed.loss_bytes is None
    assert run(source="Lightning-AI/lightning-thunder pull/1", notes=litgpt).assumed.loss_bytes == 8


def test_deepspeed_s_buffers() -> None:
    zero = {"model_name": "Llama-2-7B", "layers": "", "hidden": "", "heads": "", "tp": "", "pp": ""}
    zero |= {"vocab": "32000", "sharding": "ZeRO-2", "flash_attention": "y", "micro_batch": "1"}
    one, two, host = (
        run(**zero, notes=f"DeepSpeed{notes}").assumed.habits.buckets
        for notes in ("", "; overlap_comm", "; optimizer offload")
    )
    assert two == 2 * one
    # A buffer and a norm in 64 bits of the largest gradient: the embedding's.
    assert host - one == pytest.approx(10 * 32000 * 4096 / 2**30)


def test_software_that_gathers_after_the_step() -> None:
    software = {"DeepSpeed": True, "Megatron-LM": False, "InternEvo": True}
    for name, after in software.items():
        row = run(source=f"a/{name} b.md", sharding="ZeRO-1", model_name="Llama-2-7B")
        assert row.assumed.gathers_after is after


def test_paddle_s_norms_and_reductions() -> None:
    paddle = {"source": "a/Paddle b.md", "model_name": "Llama-2-7B"}
    assert not run(**paddle).assumed.separate_kernels
    assert not run(**paddle).assumed.overlaps_reduction
    assert run(**paddle, notes="norms not fused").assumed.separate_kernels

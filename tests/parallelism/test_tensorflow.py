"""The planner's results for TensorFlow, compared with TensorFlow and with counts by hand."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.keras_memory import Part, Way, on_gpu, saved
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.model.sizes import shape_for_size
from dtrain.parallelism.question import Question
from dtrain.parallelism.tensorflow import judge
from dtrain.parallelism.tensorflow.balance import split
from dtrain.spec.strategies import STRATEGIES
from support.oracles import ask

HARDWARE = hardware()
GIB = 2.0**30


def cluster(gpus, per_host=8, gpu="a100-80gb"):
    return HARDWARE.cluster(HARDWARE.gpu(gpu), gpus, gpus_per_host=per_host)


def answer(shape, cluster, *, global_batch, precision="bf16"):
    asked = Question(
        shape, cluster, of_family(cluster.gpu.family), global_batch, precision=precision
    )
    return judge.answer(asked)


def oracle(*arguments):
    program = Path(__file__).with_name("keras_oracle.py")
    return ask(("tensorflow",), program, *arguments)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("policy", "precision", "kind"),
    [("mixed_bfloat16", "bf16", "swiglu"), ("float32", "fp32", "gelu")],
)
def test_a_real_block_keeps_what_the_planner_counts(policy, precision, kind):
    shape = Shape(
        layers=2, hidden=256, heads=4, kv_heads=2, ffn_hidden=640, vocab=512, seq_len=128,
        head_size=64, gated=kind == "swiglu",
    )  # fmt: skip
    real = oracle("blocks", policy, kind)
    assert saved(shape, precision, moe=False) == pytest.approx(real["saved"], rel=0.01)

    part = Part(2, 0, embedding=False, head=False)
    count = part.parameters(shape) / GIB
    memory = on_gpu(shape, part, Way(2, 2), precision)
    assert memory.parameters == pytest.approx(real["variables"] * count)
    # The accumulated gradient is a variable of the optimizer.
    assert memory.optimizer + memory.gradients == pytest.approx(
        (real["slots"] + real["gradients"]) * count
    )
    assert memory.copies == pytest.approx(real["copies"] * count, rel=0.01)


@pytest.mark.tensorflow
def test_tensorflow_splits_and_refuses_like_the_planner():
    real = oracle("facts")
    assert "not supported" in real["flash"]
    assert real["dtensor"] == [[4, 4]] * 4
    assert real["model_parallel"] == ["ResourceVariable", [8, 8]], "Keras splits now: offer it"
    assert real["central_storage"] == ["device:CPU:0"]


def test_the_reference_problem_has_no_strategy_and_torch_has_a_layout():
    plan = answer(shape_for_size(100e9), cluster(64), global_batch=64)
    assert plan.strategy is None
    assert not any(verdict.fits for verdict in plan.verdicts)
    assert plan.assignment is not None
    assert not plan.assignment.fits
    needed = plan.assignment.fullest.memory.total
    assert needed > 200
    assert plan.torch is not None
    assert plan.torch.fits
    assert f"{needed:.0f} GiB on the fullest GPU" in plan.sentence
    assert "torch holds it: " in plan.sentence
    assert any("dtensor" in note for note in plan.notes)


def test_every_strategy_of_the_cluster_file_is_judged():
    names = set(STRATEGIES["tensorflow"]) - {"none", "auto", "model_parallel"}
    for gpus, per_host in ((1, 1), (8, 8), (8, 1), (64, 8)):
        plan = answer(shape_for_size(1e9), cluster(gpus, per_host), global_batch=64)
        assert sorted(verdict.name for verdict in plan.verdicts) == sorted(names)


@pytest.mark.parametrize(
    ("size", "gpus", "per_host", "name"),
    [
        (350e6, 1, 1, "one_device"),
        (350e6, 8, 8, "mirrored"),
        (350e6, 16, 8, "multi_worker_mirrored"),
        (350e6, 4, 1, "multi_worker_mirrored"),
        (7e9, 8, 8, "central_storage"),
    ],
)
def test_the_strategy_that_uses_all_gpus(size, gpus, per_host, name):
    plan = answer(shape_for_size(size), cluster(gpus, per_host), global_batch=64)
    assert plan.strategy is not None
    assert plan.strategy.name == name
    assert f"Use {name} " in plan.sentence
    assert plan.assignment is None


def test_variables_on_the_host_need_its_memory():
    shape = shape_for_size(7e9)
    unknown = answer(shape, cluster(8), global_batch=64)
    needed = unknown.verdicts[0].host_gib
    # Variables and two slots in 32 bits, and the gradients of eight GPUs.
    assert needed == pytest.approx((12 + 8 * 4) * shape.parameters / GIB)
    assert f"if each host has {needed:.0f} GiB" in unknown.sentence
    assert "torch keeps it on the GPUs" in unknown.sentence
    assert "idle" not in unknown.sentence
    two = answer(shape, cluster(16), global_batch=64)
    assert "is slow; the other 8 GPUs are idle." in two.sentence


def test_a_model_that_fits_on_one_host_is_split_by_hand():
    shape = shape_for_size(13e9)
    plan = answer(shape, cluster(8), global_batch=64)
    assert plan.strategy is None
    assignment = plan.assignment
    assert assignment is not None
    assert assignment.fits
    assert sum(placed.layers for placed in assignment.gpus) == shape.layers
    assert [placed.embedding for placed in assignment.gpus] == [True] + [False] * 7
    assert [placed.head for placed in assignment.gpus] == [False] * 7 + [True]
    following = 0
    for placed in assignment.gpus:
        assert placed.first == following
        following += placed.layers
    assert assignment.gpus[0].what.startswith("embedding, layers 0-")
    assert "one GPU computes at a time" in plan.sentence


def test_a_split_model_has_all_its_parameters_once():
    shape = shape_for_size(13e9)
    plan = answer(shape, cluster(8), global_batch=64)
    assert plan.assignment is not None
    parts = sum(placed.memory.parameters for placed in plan.assignment.gpus)
    assert parts == pytest.approx(4 * shape.parameters / GIB)


def test_on_tpus_there_is_one_strategy():
    chips = HARDWARE.cluster(HARDWARE.gpu("tpu-v4"), 8)
    plan = answer(shape_for_size(350e6), chips, global_batch=64)
    assert [verdict.name for verdict in plan.verdicts] == ["tpu"]
    assert plan.strategy is not None
    assert plan.strategy.memory.communication == 0
    large = answer(shape_for_size(70e9), chips, global_batch=64)
    assert large.strategy is None
    assert large.torch is None
    assert "TPUStrategy cannot hold" in large.sentence
    assert "a chip has 30.7 GiB" in large.sentence


def test_states_by_hand():
    """One GPU, 16 bits, no recomputation: 4 + 4 + 8 bytes per parameter, 2 for matrices."""
    shape = replace(shape_for_size(1e9), tied=False)
    memory = on_gpu(shape, Part.whole(shape), Way(1), "bf16")
    assert memory.parameters == pytest.approx(4 * shape.parameters / GIB)
    assert memory.gradients == pytest.approx(4 * shape.parameters / GIB)
    assert memory.optimizer == pytest.approx(8 * shape.parameters / GIB)
    multiplied = shape.parameters - shape.embedding_parameters
    assert memory.copies == pytest.approx(2 * multiplied / GIB)


def test_memory_of_packed_gradients():
    shape = shape_for_size(4e9)
    alone = on_gpu(shape, Part.whole(shape), Way(1, 1, "full"), "bf16")
    among = on_gpu(shape, Part.whole(shape), Way(1, 1, "full"), "bf16", replicas=8)
    held = among.copies + among.activations + among.logits + among.temporary
    assert held == pytest.approx(4 * shape.parameters / GIB)
    assert among.temporary > alone.temporary


@settings(deadline=None, max_examples=10)
@given(
    size=st.sampled_from([125e6, 1e9, 7e9, 30e9, 100e9]),
    hosts=st.sampled_from([1, 2, 8]),
    per_host=st.sampled_from([1, 2, 8]),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    global_batch=st.sampled_from([1, 7, 64, 96]),
)
def test_every_plan_is_consistent(size, hosts, per_host, precision, global_batch):
    plan = answer(
        shape_for_size(size),
        cluster(hosts * per_host, per_host),
        global_batch=global_batch,
        precision=precision,
    )
    document = json.loads(json.dumps(plan.to_document()))
    for verdict in document["strategies"]:
        parts = verdict["memory_gib"]
        total = parts.pop("total")
        assert sum(parts.values()) == pytest.approx(total, abs=0.06)
        if verdict["name"] != "tpu" and not verdict["host_memory_gib"]:
            assert verdict["fits"] == (total <= document["limit_gib"] + 0.005)
    assert document["strategy"] == (plan.strategy.name if plan.strategy else None)
    assert plan.sentence.endswith(".")
    if plan.assignment is not None:
        needed = plan.assignment.fullest.memory.total
        assert plan.assignment.fits == (needed <= plan.limit)


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    parts=st.integers(1, 5),
)
def test_the_largest_part_of_a_split_is_minimal(weights, parts):
    counts = split([float(weight) for weight in weights], parts)
    assert len(counts) == parts
    assert sum(counts) == len(weights)
    ends = list(itertools.accumulate(counts, initial=0))
    heaviest = max(sum(weights[a:b]) for a, b in itertools.pairwise(ends))
    cuts = itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
    assert heaviest == min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, len(weights))))
        for cut in cuts
    )


def test_more_gpus_in_a_host_never_need_more_memory_each():
    shape = shape_for_size(100e9)
    needs = []
    for per_host in (2, 4, 8, 16):
        plan = answer(shape, cluster(per_host, per_host), global_batch=16)
        assert plan.assignment is not None
        needs.append(plan.assignment.fullest.memory.total)
    assert needs == sorted(needs, reverse=True)

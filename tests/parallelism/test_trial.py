"""What a few steps of a small model tell about a layout's whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dtrain import PlanRequest, trials
from dtrain.diagnostics import UsageError
from dtrain.failures.cause import Report
from dtrain.parallelism.answer.document import document
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.models import model
from dtrain.parallelism.question import Answer, Question
from dtrain.parallelism.trial import (
    GIB,
    Case,
    MeasuredCase,
    Trial,
    cases,
    common,
    extended,
    unsupported,
)
from dtrain.planning.question import pose
from dtrain.runs.request import Request
from dtrain.runtime.layout import Layout
from dtrain_cli.output import stdout_paper
from dtrain_cli.views import layouts

WHOLE = Case(80, 64)


@pytest.fixture(scope="module")
def question() -> Question:
    request = PlanRequest(
        model_size="7B", gpus=16, gpu="a100-80gb", gpus_per_host=8, seq_len=2048, global_batch=256
    )
    return pose(request)


@pytest.fixture(scope="module")
def answer(question: Question) -> Answer:
    return question.answer()


def trial(
    candidate: Candidate, seconds: Callable[[Candidate], float], used: float | None = None
) -> Trial:
    """A trial in which each step takes ``seconds``, and in which the allocator of a GPU has
    ``used`` times what the planner estimates."""
    shell = Trial(candidate)
    found = []
    for case in cases(candidate.shape, candidate.layout):
        small = shell.small(case)
        allocated = None if used is None else used * small.memory.allocated * GIB
        found.append(MeasuredCase(case, seconds(small), seconds(small), allocated))
    return Trial(candidate, tuple(found))


def slower(candidate: Candidate, factor: float) -> Trial:
    return trial(candidate, lambda small: factor * small.time.total)


def test_four_cases_determine_the_four_terms() -> None:
    def seconds(case: Case) -> float:
        return 0.3 + 0.01 * case.layers + 0.2 * case.micro_batches + 0.05 * product(case)

    def product(case: Case) -> int:
        return case.layers * case.micro_batches

    small = [Case(2, 2), Case(4, 2), Case(2, 4), Case(4, 4)]
    found = extended([(case, seconds(case)) for case in small], WHOLE)
    assert found == pytest.approx(seconds(WHOLE))
    # One depth, one number of micro-batches, or one case.
    assert extended([(Case(2, 2), 0.4), (Case(4, 2), 0.8)], Case(80, 2)) == pytest.approx(16)
    assert extended([(Case(2, 2), 1.3), (Case(2, 4), 2.3)], Case(2, 64)) == pytest.approx(32.3)
    assert extended([(Case(2, 2), 0.4)], Case(4, 6)) == pytest.approx(2.4)
    # The whole step itself.
    assert extended([(Case(2, 2), 0.4), (Case(4, 2), 0.9)], Case(4, 2)) == 0.9


def test_noise_gives_no_negative_terms() -> None:
    """Twice the micro-batches seem to take more than twice the time, which cannot be."""
    noisy = [(Case(2, 2), 1.0), (Case(4, 2), 2.0), (Case(2, 4), 2.2), (Case(4, 4), 4.0)]
    assert 0.23 * 80 * 64 < extended(noisy, WHOLE) < 0.28 * 80 * 64


@pytest.mark.parametrize(
    ("layers", "layout", "depths", "counts"),
    [
        (80, Layout(data=8, grad_accumulation=32), (2, 4), (2, 4)),
        (80, Layout(data=8, grad_accumulation=1), (2, 4), (1,)),
        (80, Layout(data=8, grad_accumulation=3), (2, 4), (1, 3)),
        (80, Layout(pipeline=8, grad_accumulation=32), (16, 32), (8, 16)),
        (80, Layout(pipeline=8, grad_accumulation=8), (16, 32), (4, 8)),
        (24, Layout(pipeline=8, grad_accumulation=32), (8, 24), (8, 16)),
        (80, Layout(pipeline=4, virtual_pipeline=5, grad_accumulation=8), (40, 80), (4, 8)),
        (80, Layout(pipeline=4, virtual_pipeline=5, grad_accumulation=4), (40, 80), (4,)),
        (1, Layout(), (1,), (1,)),
    ],
)
def test_the_cases_keep_the_structure_of_the_layout(
    layers: int, layout: Layout, depths: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    shape = replace(model("llama-3-70b"), layers=layers)
    assert cases(shape, layout) == tuple(Case(depth, count) for count in counts for depth in depths)


def test_trials_reveal_another_machine(answer: Answer) -> None:
    """It computes at a seventh and communicates at a third of the speed that the planner assumes,
    and each layout's trial tells how long its whole step takes there."""
    usual = answer.question.efficiency
    there = replace(
        usual,
        gemm=usual.gemm / 7, attention=usual.attention / 7, stream=usual.stream / 7,
        link=usual.link / 3, network=usual.network / 3,
    )  # fmt: skip
    seen = set()
    for candidate in answer.shortlist(12):
        found = trial(candidate, lambda small: replace(small, efficiency=there).time.total)
        truth = replace(candidate, efficiency=there).time.total
        assert found.planned.time.total < 0.5 * truth
        assert found.corrected.time.total == pytest.approx(truth, rel=0.03)
        seen.add((candidate.layout.pipeline > 1, candidate.layout.sharding))
    assert len(seen) > 3


def test_the_order_follows_the_trials(answer: Answer) -> None:
    first, second, third = answer.shortlist(3)
    ran = (slower(first, 2.0), slower(second, 1.25), slower(third, 1.5))
    found = replace(answer, trials=ran)
    assert found.best.layout == second.layout
    assert found.best.time.total == pytest.approx(1.25 * second.time.total)
    assert found.best.interval[0] == pytest.approx(1.25 * second.interval[0])
    listed = found.shortlist(4)
    assert listed[0] == found.best
    times = [one.time.total for one in listed[1:]]
    assert times == sorted(times)
    # A layout that was not trained is corrected by what the trials have in common.
    assert common(ran) == pytest.approx((2.0 * 1.25 * 1.5) ** (1 / 3))
    trained = {one.layout for one in (first, second, third)}
    untried = next(one for one in listed if one.layout not in trained)
    assert untried.slowdown == common(ran)
    written = document(found, 4)
    assert [one["trained"] for one in written["layouts"]] == [
        one.layout in {second.layout, third.layout} for one in listed
    ]
    assert [one["slowdown"] for one in written["trials"]] == [2.0, 1.25, 1.5]
    assert written["layouts"][0]["time_s"]["total"] == pytest.approx(found.best.time.total)


def test_a_layout_without_memory_is_left_out(answer: Answer) -> None:
    first, second, third = answer.shortlist(3)
    lost = Trial(first, failure="rank 0 exited", out_of_memory=True)
    large = trial(second, lambda small: 0.1 * small.time.total, used=20.0)
    assert large.memory is not None
    assert large.memory > second.limit
    found = replace(answer, trials=(lost, large, slower(third, 3.0)))
    assert found.best.layout == third.layout
    assert not {first.layout, second.layout} & {one.layout for one in found.shortlist(8)}
    # If no trial succeeds, the next layout is the best.
    found = replace(answer, trials=(lost, replace(large, out_of_memory=True)))
    assert found.best.layout not in (first.layout, second.layout)


def test_trials_may_rule_out_all_layouts(question: Question) -> None:
    sizes = {"tensor": 2, "pipeline": 1, "context": 1, "data": 8, "micro_batch": 1}
    pinned = replace(question, fixed={**sizes, "sharding": "full", "recompute": "full"})
    answer = pinned.answer()
    assert answer.fits
    lost = [Trial(one, failure="rank 0", out_of_memory=True) for one in answer.plan.fitting]
    found = replace(answer, trials=tuple(lost))
    assert not found.fits
    assert found.best.layout in [one.layout for one in answer.plan.fitting]
    shown = layouts.as_text(found, stdout_paper(), count=4)
    assert "The trials rule out all layouts that fit on 16" in " ".join(shown.split())
    written = document(found, 4)
    assert [one["fits"] for one in written["layouts"]] == [False]
    with pytest.raises(UsageError, match="trains layouts that fit"):
        trials.tried(found, 1, Request("a.yaml", ".", ""), never, print)
    # Other layouts may be left.
    assert replace(question.answer(), trials=tuple(lost)).fits


def never(*_: object) -> Report:
    raise AssertionError("it launches nothing")


def test_memory_is_extended_to_the_whole_model(answer: Answer) -> None:
    (best,) = answer.shortlist(1)
    exact = trial(best, lambda small: small.time.total, used=1.0)
    assert exact.memory == pytest.approx(best.memory.total)
    more = trial(best, lambda small: small.time.total, used=1.1).memory
    assert more == pytest.approx(best.memory.total + 0.1 * best.memory.allocated, rel=0.05)
    assert slower(best, 1.0).memory is None


def test_a_layout_that_failed_otherwise_keeps_its_estimate(answer: Answer) -> None:
    first, second = answer.shortlist(2)
    broken = Trial(first, failure="the host was lost")
    found = replace(answer, trials=(broken, slower(second, 2.0)))
    # Only one layout is known to train.
    assert found.best.layout == second.layout
    assert first.layout in {one.layout for one in found.shortlist(4)}
    alone = replace(answer, trials=(broken,))
    assert alone.best == first
    assert alone.shortlist(3)[0] == first


def test_what_trials_do_not_train() -> None:
    llama = model("llama-3-70b")
    assert unsupported(llama, Layout()) == ""
    assert unsupported(model("mixtral-8x7b"), Layout()) == ""
    assert "MLA" in unsupported(model("deepseek-v3"), Layout())
    assert "`backend='megatron'`" in unsupported(llama, Layout(backend="megatron"))

"""Complete layouts: for any hosts, the layout of a strategy uses all workers."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtrain.runtime.layout import Layout
from dtrain.runtime.layout_rules import MisfitError
from dtrain.spec.layouts import batched, disagreements, sized, strategy_of

WORKERS = st.lists(st.integers(1, 8), min_size=1, max_size=6)
NAMES = st.sampled_from(["ddp", "fsdp", "hsdp", "tensor", "pipeline"])
GIVEN = st.dictionaries(
    st.sampled_from(["tensor", "pipeline", "data", "micro_batch", "grad_accumulation"]),
    st.integers(1, 16),
)


@given(NAMES, st.integers(1, 6), st.integers(1, 8))
def test_equal_hosts_need_no_layout(strategy: str, hosts: int, workers: int) -> None:
    assume(strategy != "hsdp" or workers > 1 or hosts == 1)
    layout = sized(strategy, {}, [workers] * hosts)
    assert layout.world_size == hosts * workers
    assert not [*disagreements(strategy, {"sharding": layout.sharding})] or layout.world_size == 1
    full = batched(layout, {}, None)
    assert layout.pipeline == 1 or full.grad_accumulation == 2 * layout.pipeline


@given(NAMES | st.just("3d"), GIVEN, WORKERS, st.none() | st.integers(1, 256))
def test_given_keys_are_kept_or_refused(
    strategy: str, given: dict[str, int], workers: list[int], global_batch: int | None
) -> None:
    try:
        layout = batched(sized(strategy, given, workers), given, global_batch)
    except MisfitError as misfit:
        assert misfit.hint
        return
    assert {key: getattr(layout, key) for key in given} == given
    assert layout.world_size == sum(workers)
    assert global_batch in (None, layout.global_batch)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(data=8), "ddp"),
        (Layout(data=8, sharding="full"), "fsdp"),
        (Layout(data=8, sharding="hybrid", shard=4), "hsdp"),
        (Layout(data=8, sharding="optimizer"), "3d"),
        (Layout(tensor=8), "tensor"),
        (Layout(pipeline=8), "pipeline"),
        (Layout(tensor=4, data=2), "3d"),
        (Layout(data=8, expert=2), "3d"),
    ],
)
def test_the_name_of_a_layout(layout: Layout, name: str) -> None:
    assert strategy_of(layout) == name

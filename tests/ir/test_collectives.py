"""The table of collectives: every row is complete, and says the same in each of its columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.backend.collectives import CALLS
from stretto.ir.collectives import ALL_REDUCE, ALL_TO_ALL, IN_PROGRAMS, KINDS, PRICED, Kind
from stretto.ir.program import STARTS, Op, Ref, Shard, TensorSpec
from tests.ir.test_varying import differing


@st.composite
def starts(draw: st.DrawFn) -> tuple[Kind, str, int, int]:
    """A kind, what it says, members, and rows of each."""
    kind, size = draw(st.sampled_from(IN_PROGRAMS)), draw(st.integers(1, 5))
    how = draw(st.sampled_from(kind.reductions)) if kind.reductions else ""
    return kind, how, size, size * draw(st.integers(1, 4))


@given(starts())
def test_what_one_gives_the_other_gets(start: tuple[Kind, str, int, int]) -> None:
    kind, how, size, rows = start
    made = kind.shape((rows, 3), size, how)
    assert made is not None
    for me in range(size):
        gets = kind.gets(rows, me, size)
        assert max(stop for _, stop in gets) == made[0]
        for other in range(size):
            a, b = kind.gives(rows, other, size)[me]
            assert 0 <= a <= b <= rows
            assert b - a == gets[other][1] - gets[other][0]
    if kind.splits:
        assert all(sum(b - a for a, b in kind.gives(rows, me, size)) == rows for me in range(size))


@given(starts())
def test_the_gradient_has_the_shape_of_what_was_given(start: tuple[Kind, str, int, int]) -> None:
    kind, how, size, rows = start
    made = kind.shape((rows, 3), size, how)
    assert made is not None
    back = KINDS[kind.gradient]
    told = back.reductions[0] if back.reductions else ""
    assert back.shape(made, size, told) == (rows, 3)
    assert KINDS[back.gradient] is kind


@given(st.sampled_from(IN_PROGRAMS), st.integers(1, 5), st.integers(1, 4))
def test_the_whole_is_the_larger_of_what_goes_in_and_comes_out(kind: Kind, size: int, rows: int) -> None:
    how = kind.reductions[0] if kind.reductions else ""
    made = kind.shape((rows * size,), size, how)
    assert made is not None
    assert kind.full_nbytes(8 * made[0], size) == 8 * max(rows * size, made[0])


def test_rows_are_whole() -> None:
    assert set(CALLS) == {kind.name for kind in IN_PROGRAMS if kind.sums or not kind.splits}
    assert tuple(kind.target for kind in IN_PROGRAMS) == STARTS
    for name, kind in KINDS.items():
        assert kind.name == name
        assert kind.gradient in (*KINDS, "")
        assert kind.cost in PRICED or not kind.in_programs
        assert KINDS[kind.cost].cost == kind.cost, "a curve is a kind's own"
    names = [kind.benchmark for kind in KINDS.values() if kind.benchmark]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", IN_PROGRAMS, ids=lambda kind: kind.name)
def test_results_differ_between_ranks_as_the_row_says(kind: Kind) -> None:
    how = kind.reductions[:1]
    spec = TensorSpec((2, 2), "float32")
    op = Op("made", kind.target, (Ref("param/x"), *how, "tp", 2), (), (spec,))

    def differ(sharded: bool, axis: str) -> bool:
        shards = {"param/x": Shard(axis, 0)} if sharded else {}
        return "made" in differing([op], {"param/x": spec}, shards, axis)

    for sharded in (False, True):
        if sharded or not kind.sums:  # a sum of what all have full is refused
            differs = {"never": False, "always": True, "as given": sharded}[kind.differs]
            assert differ(sharded, "tp") is differs
        assert differ(sharded, "dp") is sharded


def test_what_cannot_be_communicated_has_no_shape() -> None:
    assert ALL_TO_ALL.shape((3, 2), 2) is None
    assert ALL_TO_ALL.shape((), 2) is None
    assert ALL_REDUCE.shape((), 2, "sum") == ()


def test_what_an_exchange_takes() -> None:
    assert ALL_TO_ALL.full_nbytes(600, 2) == 600
    assert ALL_TO_ALL.steps(4) == 3
    assert ALL_TO_ALL.moved(4) == 0.75

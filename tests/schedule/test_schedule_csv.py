"""PyTorch's schedule files: ours and PyTorch's own reader and writer agree, and refusals say where."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from stretto.errors import UsageError
from stretto.ir.action import Overlap, Schedule
from stretto.schedule.csv import from_csv, read_csv, to_csv
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.schedule.timing import PhaseTimes, time_schedule

OVERLAPPED = "0F0,,0F1,(0F2;3B0)OVERLAP_F_B,3B1\n1F0,2F0,2B0,1B0\n"


def torch_schedule(name: str, stages: int, ranks: int, kept: list[int], microbatches: int):
    """A schedule of PyTorch's, far enough built to read and write files; needs no process group."""
    parts = [
        SimpleNamespace(
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            stage_index=stage,
            has_backward=True,
            is_last=stage == stages - 1,
            submod=nn.Identity(),
        )
        for stage in kept
    ]
    return getattr(torch_schedules, name)(parts, microbatches, loss_fn=Mock())


@pytest.mark.parametrize("family", FAMILIES)
def test_pytorch_reads_what_we_write(family, tmp_path):
    schedule = make_schedule(family, 3, 5)
    (tmp_path / "ours.csv").write_text(to_csv(schedule))
    runtime = torch_schedule("_PipelineScheduleRuntime", schedule.stages, 3, [0], 5)
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    read = tuple(tuple(str(action) for action in runtime.pipeline_order[rank]) for rank in range(3))
    assert read == tuple(tuple(map(str, order)) for order in schedule.orders)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("ScheduleInterleaved1F1B", [0, 2]),
        ("ScheduleInterleavedZeroBubble", [0, 2]),
        ("ScheduleZBVZeroBubble", [0, 3]),
        ("ScheduleDualPipeV", [0, 3]),
    ],
)
def test_we_read_what_pytorch_writes(name, kept, tmp_path):
    stages, ranks = 4, 2
    theirs = torch_schedule(name, stages, ranks, kept, 8)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    schedule = read_csv(tmp_path / "theirs.csv")
    assert (schedule.stages, schedule.microbatches, schedule.ranks) == (stages, 8, ranks)
    assert schedule.stage_ranks == tuple(theirs.stage_index_to_group_rank[stage] for stage in range(stages))
    for rank in range(ranks):
        theirs_order = [str(action) for action in theirs.pipeline_order[rank] if action is not None]
        assert [str(slot) for slot in schedule.orders[rank]] == theirs_order
    overlapped = any(isinstance(slot, Overlap) for slot in schedule.orders[0])
    assert overlapped == (name == "ScheduleDualPipeV")
    # PyTorch's schedules are legal: our clock must get through them.
    assert time_schedule(schedule, PhaseTimes(1.0, 1.0, 1.0, 0.25)).makespan > 8 * 2 * 3


@given(st.sampled_from(list(FAMILIES)), st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_text_survives_a_round_trip(family, ranks, microbatches):
    schedule = make_schedule(family, ranks, microbatches)
    read = from_csv(to_csv(schedule))
    assert read == Schedule("csv", schedule.stages, microbatches, schedule.stage_ranks, schedule.orders)


def test_idle_cells_overlaps_and_virtual_stages_are_read():
    schedule = from_csv(OVERLAPPED)
    assert (schedule.family, schedule.stages, schedule.microbatches) == ("csv", 4, 3)
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert to_csv(schedule) == OVERLAPPED.replace(",,", ",")


def test_ranks_without_actions_keep_their_place():
    for text in ("0F0,0B0\n\n1F0,1B0\n\n\n", "0F0,0B0\r\n,,\r\n1F0,1B0\r\n"):
        schedule = from_csv(text)
        assert schedule.stage_ranks == (0, 2)
        assert [len(order) for order in schedule.orders] == [2, 0, 2]
        assert from_csv(to_csv(schedule)) == schedule


def test_files_texts_and_byte_order_marks(tmp_path):
    path = tmp_path / "0F0,schedule.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0 , 0B0")
    assert read_csv(path) == read_csv(str(path)) == from_csv("0F0,0B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "schedule text, line 2, column 2: cannot read action '1X0'"),
        ("0F0,0SEND_F0\n", "line 1, column 2: .*'0SEND_F0'.*dump it with PyTorch's format='compute_only'"),
        (
            "0F0,0B0\n0F1,0B1\n",
            "line 2, column 1: '0F1' puts stage 0 on rank 1, but line 1, column 1 puts it on rank 0",
        ),
        ("0F0\n\n(1F0;0B0)OVERLAP_F_B\n", r"line 3, column 1: .* stage 0 on rank 2, but .* on rank 0"),
        ("0F0,2F0,0B0\n", "line 1, column 2: stage 2 is used, but no rank runs stage 1"),
        ("99999999999F0\n", "stage 99999999999 is used, but no rank runs stage 0"),
        ("(0F0;0F0)OVERLAP_F_B\n", "line 1, column 1: .* overlaps an action with itself"),
        ("(0F0)OVERLAP_F_B\n", "line 1, column 1: .*needs two actions"),
        ("\n\n", "has no action"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        from_csv(text)

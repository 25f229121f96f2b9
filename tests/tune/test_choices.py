"""What may be chosen: every layout of the devices that the settings' own checks allow, and their words."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.config import ParallelSettings, TrainSettings
from stretto.errors import UsageError
from stretto.schedule.families import FAMILIES
from stretto.tune.choices import Candidate, Choices, Dealt, LayoutChoice, read_fixed
from tests.tune.small import settings


def test_layouts_use_all_devices_and_share_the_batch_evenly(tmp_path: Path) -> None:
    choices = Choices(settings(tmp_path), 8)
    found = list(choices.layouts())
    assert len(found) == len(set(found)) > 20
    for layout in found:
        assert layout.pp * layout.dp * layout.tp == 8
        assert 8 % layout.pieces == 0
        assert 4 % layout.tp == 0
        assert layout.pp <= 4
    # By hand: tp of 1, 2, 4; the others of 8 shared by pp (up to 4) and dp; with tp also shared sequences.
    shapes = {(one.pp, one.dp, one.tp) for one in found}
    assert shapes == {(pp, 8 // pp // tp, tp) for tp in (1, 2, 4) for pp in (1, 2, 4) if pp * tp <= 8}


def test_ranks_share_long_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {one.cp for one in Choices(settings(tmp_path), 8).layouts()} == {1}
    monkeypatch.setattr("stretto.tune.choices.LONG", 1)
    found = list(Choices(settings(tmp_path), 8).layouts())
    assert {one.cp for one in found} == {1, 2, 4, 8}
    assert all(one.pp * one.dp * one.cp * one.tp == 8 for one in found)
    assert {one.cp for one in Choices(settings(tmp_path), 8, {"cp": 2}).layouts()} == {2}


def test_what_is_refused_has_the_words_of_the_settings(tmp_path: Path) -> None:
    choices = Choices(settings(tmp_path), 8)
    list(choices.layouts())
    assert any("model.heads = 4 must be a multiple of parallel.tp = 8" in text for text in choices.refused)
    assert any("parallel.pp = 8 must not be above model.layers = 4" in text for text in choices.refused)


def test_a_candidate_is_the_settings_that_its_changes_make(tmp_path: Path) -> None:
    given = settings(tmp_path)
    choices = Choices(given, 8)
    candidate = Candidate(LayoutChoice(2, 2, 1, 2, True, 2), "interleaved-1f1b", 2, "full")
    made = choices.settings_of(candidate)
    assert made.model == given.model
    assert (made.parallel.pp, made.parallel.dp, made.parallel.tp, made.parallel.microbatches) == (2, 2, 2, 2)
    assert made.parallel.sequence_parallel
    assert made.parallel.recompute == "full"
    assert choices.own() is None  # they are for two devices
    own = Choices(given, 2).own()
    assert own == Candidate(LayoutChoice(2, 1, 1, 1, False, 4), "1f1b", 1)


def test_keys_about_axes_that_are_not_used_are_left_out(tmp_path: Path) -> None:
    given = settings(tmp_path).model_dump(exclude_unset=True)
    given["model"] = {"kind": "moe", "layers": 2, "hidden": 64, "heads": 4, "context": 64, "experts": 4}
    given["model"]["capacity_factor"] = 0.0
    given["parallel"] = {"dp": 2, "ep": 2, "pipe_experts_multi_data": 2, "ep_buffer": 3.0}
    choices = Choices(TrainSettings.model_validate(given), 2)
    with_experts = choices.settings_of(Candidate(LayoutChoice(1, 2, 2, 1, False, 2), "1f1b", 1))
    assert with_experts.parallel.pipe_experts_multi_data == 2
    without = choices.settings_of(Candidate(LayoutChoice(2, 1, 1, 1, False, 2), "1f1b", 1))
    assert without.parallel.pipe_experts_multi_data == 1
    assert without.parallel.ep_buffer is None


def test_copies_may_keep_all_kinds_in_parts(tmp_path: Path) -> None:
    given = settings(tmp_path)
    layout = LayoutChoice(1, 8, 1, 1, False, 1)
    whole = tuple((Dealt(zero),) for zero in (0, 1, 2, 3))
    assert Choices(given, 8).kinds(layout) == whole
    within = tuple((Dealt(zero, 4), Dealt(zero)) for zero in (1, 2, 3))
    assert Choices(given, 8, node_devices=4).kinds(layout) == ((Dealt(),), *within)
    assert Choices(given, 8, node_devices=8).kinds(layout) == whole
    assert Choices(given, 8).kinds(LayoutChoice(8, 1, 1, 1, False, 1)) == ((Dealt(),),)
    assert Choices(given, 8, {"zero": 2}, 4).kinds(layout) == ((Dealt(2),),)
    for zero in (0, 3, "auto"):
        said = given.model_copy(update={"parallel": ParallelSettings(dp=8, zero=zero)})
        assert Choices(said, 8, node_devices=4).kinds(layout) == ((Dealt(zero),),)
    made = Choices(given, 8).settings_of(Candidate(layout, "1f1b", 1, dealt=Dealt(2, 4)))
    assert (made.parallel.zero, made.parallel.dp_shard) == (2, 4)
    assert str(Candidate(layout, "1f1b", 1, dealt=Dealt(2, 4))).endswith("1f1b zero=2 over 4")


def test_schedules_are_those_that_there_are(tmp_path: Path) -> None:
    choices = Choices(settings(tmp_path, layers=8), 4)
    found = list(choices.orders(LayoutChoice(4, 1, 1, 1, False, 8)))
    assert {name for name, _ in found} == set(FAMILIES)
    assert ("interleaved-1f1b", 2) in found
    assert ("interleaved-1f1b", 3) not in found  # 12 stages of 8 blocks
    assert list(choices.orders(LayoutChoice(1, 4, 1, 1, False, 2))) == [("1f1b", 1)]


def test_what_is_fixed_is_not_chosen(tmp_path: Path) -> None:
    fixed = read_fixed(["tp=2", "schedule=zb-v", "parallel.microbatches=4", "sequence_parallel=true"])
    assert fixed == {"tp": 2, "schedule": "zb-v", "microbatches": 4, "sequence_parallel": True}
    choices = Choices(settings(tmp_path), 8, fixed)
    for layout in choices.layouts():
        assert (layout.tp, layout.microbatches, layout.sequence_parallel) == (2, 4, True)
        assert list(choices.orders(layout)) == [("zb-v", 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sp=2", "expected KEY=VALUE with a key of pp, dp"),
        ("tp", "expected KEY=VALUE"),
        ("tp=0", "--fix tp=0: tp = 0"),
        ("tp=two", "--fix tp=two: tp = 'two'"),
        ("zero=4", "--fix zero=4: zero = 4"),
        ("recompute=some", "input should be 'none', 'selective'"),
        ("schedule=mine", "unknown schedule family 'mine'"),
        ("ampipe_degree=auto", "compared anyway"),
    ],
)
def test_a_wrong_fix_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_fixed([text])
    assert said in str(caught.value)

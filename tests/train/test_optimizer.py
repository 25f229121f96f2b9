"""Optimizers and schedules of the rate by name: what they do, how they go on, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.tiny import steps_of, train, write_settings

from stretto.config import LRScheduleSettings, OptimizerSettings, load_settings
from stretto.errors import UsageError
from stretto.files.say import silent
from stretto.train import launch, trainer
from stretto.train.checkpoint_files import read_state
from stretto.train.going_on import check_compatible
from stretto.train.optimizer import learning_rate, make_optimizer, state_of
from stretto.train.task import task_of


def settings_of(**fields: Any) -> OptimizerSettings:
    return OptimizerSettings.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        (
            {"name": "SGD", "options": {"momentum": 0.9, "nesterov": True}, "weight_decay": 0.0},
            lambda kept: torch.optim.SGD(kept, lr=0.1, momentum=0.9, nesterov=True),
        ),
        (
            {"name": "NAdam", "betas": [0.8, 0.9], "weight_decay": 0.0},
            lambda kept: torch.optim.NAdam(kept, lr=0.1, betas=(0.8, 0.9)),
        ),
        *(
            ({"name": name}, lambda kept, name=name: getattr(torch.optim, name)(kept, lr=0.1))
            for name in ("SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Rprop")
        ),
    ],
    ids=lambda one: one["name"] if isinstance(one, dict) else "",
)
def test_it_is_the_one_of_pytorch(fields: dict[str, Any], plain: Any) -> None:
    made, own = ([torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))] for _ in range(2))
    for optimizer, (kept,) in (
        (make_optimizer(made, settings_of(lr=0.1, **fields)), made),
        (plain(own), own),
    ):
        for scale in (1.0, -0.5, 2.0):
            kept.grad = torch.linspace(-1.0, 1.0, 6).reshape(2, 3) * scale
            optimizer.step()
    assert torch.equal(made[0], own[0])


def test_only_matrices_decay() -> None:
    for name in ("AdamW", "SGD", "RMSprop", "Adamax"):
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,))]
        groups = make_optimizer(parameters, settings_of(name=name, weight_decay=0.1)).param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_adamw_has_its_defaults_where_they_are_given_or_not() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    for fields in ({}, {"weight_decay": 0.1}):
        (group,) = make_optimizer(parameters, settings_of(**fields)).param_groups
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-8, 0.1)


def test_memory_is_counted_for_the_state_that_it_has() -> None:
    momentum = {"name": "SGD", "options": {"momentum": 0.9}}
    kinds = {"AdamW": "adamw", "SGD": "sgd", "RMSprop": "momentum", "NAdam": "adamw"}
    assert {name: state_of(settings_of(name=name)) for name in kinds} == kinds
    assert state_of(settings_of(**momentum)) == "momentum"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "AdamV"}, "'AdamV' is not in torch.optim: did you mean 'Adam'"),
        ({"name": "SGD", "options": {"momentun": 0.9}}, r"options.momentun: SGD has .* 'momentum'"),
        ({"options": {"eps": 1e-6}}, "it is the setting optimizer.eps"),
        ({"name": "SGD", "eps": 1e-8}, "optimizer.eps = 1e-08: SGD does not take it; drop it"),
        ({"name": "SGD", "betas": [0.5, 0.5]}, r"optimizer.betas = \(0.5, 0.5\): SGD does not take it"),
        ({"name": "SGD", "options": {"momentum": -1.0}}, "Invalid momentum value: -1.0"),
        ({"name": "LBFGS"}, "'LBFGS' is refused by PyTorch"),
        ({"name": "SparseAdam"}, "'SparseAdam' is refused by PyTorch"),
    ],
)
def test_what_pytorch_does_not_have_is_refused_before_ranks_are_started(
    fields: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=words):
        state_of(settings_of(**fields))
    settings = load_settings(write_settings(tmp_path, pp=2))
    settings = settings.model_copy(update={"optimizer": settings_of(**fields)})
    with pytest.raises(UsageError, match=words):
        launch.start(settings, ["no such command"])


def test_each_goes_on_bit_for_bit_and_none_from_another_ones_state(tmp_path: Path) -> None:
    changes = ["optimizer.name=SGD", "optimizer.options={momentum=0.9}", "optimizer.lr=0.1"]
    changes += ["lr_schedule.kind=wsd", "lr_schedule.decay_steps=3"]
    straight = train(write_settings(tmp_path, steps=6, every=3, run="straight"), *changes).settings.run_dir
    path = write_settings(tmp_path, steps=6, every=3, run="again")
    train(path, *changes, f"checkpoint.resume={straight}/checkpoints/step-000003")
    lines, expected = steps_of(path.with_suffix("")), steps_of(straight)
    assert [*lines] == [4, 5, 6]
    for step, line in lines.items():
        assert [line[key] for key in ("loss", "grad_norm", "lr")] == [
            expected[step][key] for key in ("loss", "grad_norm", "lr")
        ]
    with pytest.raises(UsageError, match=r"optimizer.name = 'AdamW', but .* has the state of SGD"):
        train(path, "training.steps=7")


@pytest.mark.parametrize(
    ("name", "more", "absent"),
    [("AdamW", "amsgrad", "max_exp_avg_sq"), ("RMSprop", "centered", "grad_avg"), ("SGD", "nesterov", "")],
)
def test_options_that_need_other_state_are_refused_before_training(
    tmp_path: Path, name: str, more: str, absent: str
) -> None:
    changes, options = [f"optimizer.name={name}"], {"SGD": "momentum=0.9, "}.get(name, "")
    train(write_settings(tmp_path, steps=2, every=2), *changes, "optimizer.lr=0.01")
    changes.append(f"optimizer.options={{{options}{more}=true}}")
    path = write_settings(tmp_path, steps=3, every=2)
    if not absent:  # it had no state, and begins with none
        assert train(path, *changes).step == 3
        return
    with pytest.raises(
        UsageError, match=rf"needs the state '{absent}' .*: set the options back, or start again"
    ):
        train(path, *changes)


def test_a_checkpoint_from_before_there_were_others_is_of_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_settings(tmp_path, steps=2, every=2)
    then = train(path).settings.checkpoint_dir / "step-000002"
    state = read_state(then)
    del state.settings["optimizer"]["name"]
    settings = load_settings(path, ["optimizer.name=SGD"])
    with pytest.raises(UsageError, match="has the state of AdamW: set it back"):
        check_compatible(state, then, settings, task_of(settings, silent))
    monkeypatch.setattr(trainer, "check_compatible", lambda *_: [])  # as if its settings said so
    with pytest.raises(UsageError, match="has the state of AdamW, and this optimizer is SGD"):
        train(path, "training.steps=3", "optimizer.name=SGD")


def test_a_rate_that_is_stable_and_then_decays() -> None:
    schedule = LRScheduleSettings(kind="wsd", warmup_steps=2, min_lr_ratio=0.2, decay_steps=4)
    rates = [learning_rate(schedule, 1.0, 10, step) for step in range(11)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    short = [learning_rate(schedule, 1.0, 4, step) for step in range(4)]
    assert short == pytest.approx([0.5, 1.0, 1.0, 0.2])


def test_decay_steps_belong_to_one_schedule(tmp_path: Path) -> None:
    for changes in (["lr_schedule.kind=wsd"], ["lr_schedule.decay_steps=3"]):
        with pytest.raises(UsageError, match=r"lr_schedule.decay_steps = . belongs to lr_schedule.kind"):
            load_settings(write_settings(tmp_path), changes)

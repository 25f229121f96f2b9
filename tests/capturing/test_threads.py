"""A process traces one model at a time; threads that trace none of them do as they always do."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.evaluation import capture_evaluation

BATCH = torch.ones(2, 4)


def test_a_thread_that_traces_leaves_the_others_alone() -> None:
    weight = torch.ones(3, requires_grad=True)
    backward, apply = torch.autograd.backward, torch.autograd.Function.__dict__["apply"]
    traces, stepped = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def while_it_traces(what: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            traces.wait(60)
            try:
                what()
            except BaseException as error:
                failed.append(error)
            stepped.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def plain(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss

    def meanwhile(model: nn.Module, batch: Tensor) -> Tensor:
        traces.set()
        stepped.wait(60)
        return plain(model, batch)

    def captured(loss: Callable[..., Tensor] = plain) -> stretto.Job:
        return stretto.capture(nn.Linear(4, 4), BATCH, loss, stretto.Parallel())

    def step() -> None:
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]

    others = [while_it_traces(step), while_it_traces(captured)]
    first = captured(meanwhile)
    for thread in others:
        thread.join()
    assert not failed
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]
    assert torch.autograd.backward is backward
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert not torch.compiler.is_compiling()
    assert first.stages == captured().stages


def test_threads_that_share_a_model_evaluate_it_each_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()

    def plain(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss

    training = stretto.capture(model, BATCH, plain, stretto.Parallel())
    failed: list[BaseException] = []

    def evaluate() -> None:
        try:
            for _ in range(3):
                job = capture_evaluation(model, BATCH, plain, training)
                assert not [op for stage in job.stages for op in stage.all_ops if "dropout" in op.target]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(module.training for module in model.modules())

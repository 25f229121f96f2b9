"""Jobs and plans in an interpreter and a notebook: a line, a picture, a table; and what `print(plan)` has."""

from __future__ import annotations

import base64
import functools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import stretto
from stretto.ir.program import Count
from stretto.ir.work import speed_words, trained_on
from stretto.models.gpt import GPT, GPTConfig, next_token_loss, next_token_sum
from stretto.report import notebook
from tests.clusters import cores

ROWS, LENGTH = 8, 16
PARALLEL = stretto.Parallel(pp=2, microbatches=4)


@functools.cache
def made(dp: int = 1, cp: int = 1) -> stretto.Plan:
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=LENGTH), seed=0)
    batch = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)
    parallel = stretto.Parallel(pp=2, dp=dp, cp=cp, microbatches=4)
    return stretto.plan(stretto.capture(model, batch, next_token_loss, parallel), cores())


def test_an_interpreter_shows_a_line() -> None:
    plan = made()
    assert repr(plan.job) == "<Job GPT: 2 stages, 4 microbatches>"
    assert re.fullmatch(
        r"<Plan GPT: [\w-]+, 2 stages on 2 ranks, 4 microbatches, [\d.]+ ms a step>", repr(plan)
    )
    assert "dp = 2" in repr(made(dp=2).job)
    assert repr(replace(plan, prediction=None)).endswith("not simulated>")


@pytest.mark.parametrize("what", ["plan", "job"])
def test_a_notebook_shows_a_picture_and_a_table(what: str) -> None:
    plan = made()
    page = (plan if what == "plan" else plan.job)._repr_html_()
    assert page is not None
    [data] = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    picture = ElementTree.fromstring(base64.b64decode(data))
    assert picture.tag.endswith("svg")
    labels = "".join(picture.itertext())
    assert "0F0" in labels or "F0" in labels
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    if what == "plan":
        assert plan.prediction is not None
        for word in ("step", "lower bound", "gap to the bound", "optimizer's state", "activations"):
            assert any(word.replace("'", "&#x27;") in cell for cell in cells), word
        assert "tokens/s" in page
    else:
        assert [cell for cell in cells if cell in ("0", "1")] == ["0", "1"]
        assert "parameters" in page
        assert "Each phase is as long as its kFLOPs" in page
        assert (
            max(int(word) for word in re.findall(r">(\d+)<", ElementTree.tostring(picture, "unicode")))
            < 10**4
        )
    assert "<script" not in page
    # Rules of the page's style are of its own elements alone.
    rules = re.findall(r"([^{}]+)\{", page.partition("</style>")[0].partition("<style>")[2])
    assert rules
    assert all(one.strip().startswith((".stretto", "@media")) for rule in rules for one in rule.split(","))


def test_a_picture_of_too_many_boxes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "MOST_BOXES", 3)
    page = made()._repr_html_() or ""
    assert "boxes are too many to draw here" in page
    assert "<img" not in page
    assert "<table" in (made().job._repr_html_() or "")


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_print_has_speed_and_all_parts_of_memory(dp: int, cp: int) -> None:
    plan = made(dp, cp)
    assert trained_on(plan.job) == (ROWS * LENGTH, "tokens")
    assert plan.prediction is not None
    text = str(plan)
    per_s = ROWS * LENGTH / plan.prediction.step_us * 1e6
    found = re.search(r"speed +([\d,]+) tokens/s \(([\d,]+) a device\)", text)
    assert found is not None
    assert float(found[1].replace(",", "")) == pytest.approx(per_s, abs=1)
    assert float(found[2].replace(",", "")) == pytest.approx(per_s / plan.world, abs=1)
    for part in ("parameters", "gradients", "optimizer's state", "activations"):
        assert part in text
    peaks = re.search(r"peak by .*? +(\d+), (\d+) KiB", text)
    assert peaks is not None
    assert [int(peak) for peak in peaks.groups()] == [round(b / 1024) for b in plan.prediction.peak_bytes]


def test_what_a_step_trains_on() -> None:
    job = made().job
    assert trained_on(replace(job, mean_over=Count(60.0))) == (240.0, "tokens")
    assert trained_on(replace(job, mean_over=None)) == (ROWS, "samples")
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=LENGTH), seed=0)
    batch = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)
    counted = stretto.capture(model, batch, next_token_sum, stretto.Parallel(dp=2, microbatches=2))
    assert trained_on(counted) == (ROWS * LENGTH, "tokens")


def test_the_flops_of_a_step_over_the_peak_are_printed() -> None:
    plan = made()
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=LENGTH), seed=0)
    batch = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)
    job = stretto.capture(
        model, batch, next_token_loss, stretto.Parallel(pp=2, microbatches=4), device="cuda"
    )
    known = stretto.plan(job, "h100x2")
    assert known.prediction is not None
    mfu = known.work.mfu(known.prediction.step_us)
    assert mfu is not None
    assert f"MFU {100 * mfu:.3g} %" in str(known)
    assert ("MFU" in str(plan)) == (plan.work.peak is not None)
    assert speed_words(known.job, known.work, 2, known.prediction.step_us) in str(known)

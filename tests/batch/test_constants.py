"""Constants of a batch: a change anywhere in them is seen; what cannot be compared is refused."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import namedtuple
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from stretto.batch import tree
from stretto.batch.constants import text_of
from stretto.runtime.fit import fit_batch
from tests.capturing.zoo import Chain, rows


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Options:
    rate: float
    names: list[str] = dataclasses.field(default_factory=list, repr=False)


class Hides:
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __repr__(self) -> str:
        return "Hides()"


class Slots:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Text(str):
    pass


Pair = namedtuple("Pair", "one two")


def array(at: int = 0, value: float = 0.0, dtype: str = "float64") -> np.ndarray:
    made = np.zeros(5000, dtype)
    made[at] = value
    return made


OBJECTS = np.array([1, "a", None], dtype=object)
DIFFER: list[tuple[Any, Any]] = [
    (array(), array(2500, 1e-300)),
    (array(), array(2500, -0.0)),
    (array(), array(dtype="float32")),
    (array().reshape(50, 100), array().reshape(100, 50)),
    (OBJECTS, np.array([1, "b", None], dtype=object)),
    (np.float32(0.1), np.float64(0.1)),
    (np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
    (0.0, -0.0),
    (0.1, math.nextafter(0.1, 1)),
    (1, True),
    (1, 1.0),
    (1, "1"),
    ("a", b"a"),
    (10**5000, 10**5000 + 1),
    (Mode.A, Mode.B),
    (Options(0.1, ["a"]), Options(0.1, ["b"])),
    (Hides([1] * 5000), Hides([1] * 4999 + [2])),
    (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    ({1, 2}, {1, 3}),
    (Text("a"), Text("b")),
    (Text("a"), "a"),
    (slice(1, 2), slice(1, 3)),
    (torch.float32, torch.float64),
    (date(2020, 1, 1), date(2020, 1, 2)),
    (Path("a"), Path("b")),
    (math.sin, math.cos),
]


@pytest.mark.parametrize(("one", "other"), DIFFER, ids=lambda v: type(v).__name__)
def test_other_values_have_another_text(one: Any, other: Any) -> None:
    assert text_of(one, "x") != text_of(other, "x")


SAME = [
    lambda: float("nan"),
    lambda: array(7, 1.0),
    lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    lambda: Options(0.5, ["a", "b"]),
    lambda: Hides({"a": [1, None]}),
    lambda: {"c", "b", "a"},
    lambda: Mode.B,
]


@pytest.mark.parametrize("make", SAME)
def test_equal_values_have_equal_texts(make: Any) -> None:
    assert text_of(make(), "x") == text_of(make(), "x")


def looped() -> Any:
    made = Hides(None)
    made.kept = made
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (iter([1]), "is a builtins.list_iterator and cannot be compared with that of another batch"),
        (torch.Generator(), "is a torch._C.Generator and cannot be compared"),
        (Slots(1), "is a tests.batch.test_constants.Slots and cannot be compared"),
        (Hides([torch.ones(2)]), "contains a tensor"),
        (looped(), "contains itself"),
        ((lambda at: lambda: at)(3), "is a builtins.function and cannot be compared"),
    ],
)
def test_what_cannot_be_compared(value: Any, message: str) -> None:
    with pytest.raises(stretto.UsageError) as caught:
        tree.fixed({"x": rows(), "other": [value]})
    assert message in str(caught.value)
    assert "batch leaf 'other.0'" in str(caught.value)
    assert "Make it a tensor" in str(caught.value)


def job_of(batch: Any) -> Any:
    loss = lambda model, mb: model(mb["x"]).square().mean()  # noqa: E731
    return stretto.capture(Chain(), batch, loss, stretto.Parallel(microbatches=2))


def test_a_batch_with_other_constants() -> None:
    batch = {"x": rows(), "weights": array(), "pair": Pair(1, [])}
    job = job_of(batch)
    device = torch.device("cpu")
    fit_batch(job, {"pair": Pair(1, []), "weights": array(), "x": rows(seed=2)}, device)
    for other, message in (
        ({**batch, "weights": array(2500, 1.0)}, "leaf 'weights' is numpy <f8[5000] sha256"),
        ({**batch, "pair": Pair(1, {})}, "leaf 'pair.1' is dict{}, but the plan was captured with list"),
        ({**batch, "pair": Pair(1, ["a"])}, "leaf 'pair.1.0' is 'a'"),
        ({**batch, "scale": 2.0}, "leaf 'scale' is 2.0, but the plan was captured with none"),
        ({"x": rows(), "pair": Pair(1, [])}, "leaf 'weights' is missing"),
    ):
        with pytest.raises(stretto.UsageError) as caught:
            fit_batch(job, other, device)
        assert message in str(caught.value)


def test_two_leaves_of_one_name() -> None:
    with pytest.raises(stretto.UsageError, match=r"two leaves that are both called 'x\.y'"):
        job_of({"x": {"y": rows()}, "x.y": rows()})
    with pytest.raises(stretto.UsageError, match="two leaves that are both called '1'"):
        job_of({"x": rows(), 1: 2, "1": 3})

"""Leaves that every microbatch is given in full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stretto
from stretto.batch import tree
from stretto.errors import UsageError


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, torch.int64),
        (0.5, torch.float64),
        (True, torch.bool),
        (np.float32(0.5), torch.float32),
        (np.int64(3), torch.int64),
        (np.ones(3), torch.float64),
        (torch.ones(2, 3), torch.float32),
    ],
    ids=lambda item: str(item)[:20],
)
def test_what_can_be_marked(value: Any, dtype: torch.dtype) -> None:
    made = stretto.replicated(value).tensor
    assert made.dtype is dtype
    assert tuple(made.shape) == np.shape(value)
    assert stretto.replicated(stretto.replicated(value)).tensor.equal(made)


@pytest.mark.parametrize("value", ["a", None, [1, 2], {"a": 1}, 2j, 10**400])
def test_what_cannot(value: Any) -> None:
    with pytest.raises(UsageError, match=r"stretto\.replicated "):
        stretto.replicated(value)


def test_a_microbatch_has_the_tensor_in_the_place_of_the_mark() -> None:
    batch = {"a": torch.zeros(4, 2), "b": [stretto.replicated(torch.ones(3)), 7], "n": stretto.replicated(5)}
    assert tree.replicated_leaves(batch) == ("b.0", "n")
    assert tree.fixed(batch) == {"b.1": "7"}
    assert tree.microbatch_shapes(batch, 2) == {"a": (2, 2), "b.0": (3,), "n": ()}
    leaves = list(tree.flatten(batch).values())
    rebuilt = tree.rebuilder(batch)(leaves)
    assert rebuilt["b"][0] is leaves[1]
    assert int(rebuilt["n"]) == 5
    assert tree.replicated_leaves(stretto.replicated(1)) == ("batch",)


class _Rows:
    def __init__(self) -> None:
        self.ids, self.note = torch.zeros(2), "a"


@pytest.mark.parametrize(("batch", "path"), [(_Rows(), "batch"), ({"x": [_Rows()]}, "x.0")])
def test_an_object_with_tensors_is_no_leaf(batch: object, path: str) -> None:
    with pytest.raises(UsageError, match=rf"leaf '{path}' is a _Rows with tensors \(ids\).*vars"):
        tree.flatten(batch)

"""Where the batch's dim is: prefixes of the batch's tree, and what containers leaves are in."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto.batch import tree
from stretto.batch.dims import marked, shape_given, with_dims
from stretto.errors import UsageError

Pair = namedtuple("Pair", "inputs targets")


@dataclasses.dataclass(frozen=True)
class Rows:
    ids: Tensor
    at: Tensor
    scale: float = 2.0


class Encoding(UserDict):  # type: ignore[type-arg]
    """As `transformers.BatchEncoding`: read by keys and by attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


IDS, AT, ONE = torch.arange(8).reshape(4, 2), torch.arange(24).reshape(3, 4, 2), torch.arange(2)[None]


@pytest.mark.parametrize(
    ("batch", "dims", "found"),
    [
        ({"ids": IDS, "at": AT}, {"at": 1}, {"at": 1}),
        ({"ids": IDS, "at": AT}, {"at": -2}, {"at": 1}),
        ({"ids": IDS, "at": ONE}, {"ids": 0, "at": None}, {"at": None}),
        ({"ids": IDS, "n": {"a": AT, "b": [AT, 3]}}, {"n": 1}, {"n.a": 1, "n.b.0": 1}),
        ({"ids": IDS, "n": {"a": AT, "b": [ONE, AT]}}, {"n": {"b": [None, 1]}}, {"n.b.0": None, "n.b.1": 1}),
        ((AT, [AT, AT]), 1, {"0": 1, "1.0": 1, "1.1": 1}),
        ((IDS, AT), (0, 1), {"1": 1}),
        (Pair({"ids": IDS}, AT), {"targets": 1}, {"1": 1}),
        (Pair({"ids": IDS}, AT), (0, 1), {"1": 1}),
        (Rows(IDS, AT), {"at": 1}, {"at": 1}),
        (Encoding(ids=IDS, at=AT), {"at": 1}, {"at": 1}),
        (AT, 1, {"batch": 1}),
        ({"ids": IDS, "at": stretto.replicated(ONE)}, {"at": None}, {}),
        ({"ids": IDS}, 0, {}),
    ],
    ids=str,
)
def test_a_prefix_of_the_batch(batch: Any, dims: Any, found: dict[str, int | None]) -> None:
    given = with_dims(batch, dims)
    assert dict(tree.said_dims(given)) == found
    assert tree.flatten(given).keys() == tree.flatten(batch).keys()
    again = marked(batch, found)  # as every step's batch is
    for name, leaf in tree.flatten(again).items():
        assert torch.equal(leaf, tree.flatten(given)[name])
        if name in found:
            assert shape_given(tuple(leaf.shape), found[name]) == tree.flatten(batch)[name].shape
    rebuilt = tree.rebuilder(given)(list(tree.flatten(given).values()))
    assert type(rebuilt) is type(batch)
    for name, leaf in tree.flatten(rebuilt).items():
        assert torch.equal(leaf, tree.flatten(batch)[name]), "the model's code gets what the batch has"


@pytest.mark.parametrize(
    ("batch", "dims", "words"),
    [
        (
            {"ids": IDS},
            {"idz": 1},
            r"batch_dims names 'idz', which the batch lacks; did you mean 'ids'.*has: ids",
        ),
        ({"ids": IDS}, {"ids": 2}, r"batch_dims of 'ids' is 2, and the leaf has 2 dims, of shape \[4, 2\]"),
        ({"ids": IDS}, {"ids": -3}, r"batch_dims of 'ids' is -3"),
        ({"ids": IDS}, {"ids": True}, r"batch_dims of 'ids' is True: give a dim, or None"),
        ({"ids": IDS}, {"ids": {"a": 1}}, r"batch_dims of 'ids' is \{'a': 1\}: give a dim"),
        ({"ids": [IDS, AT]}, {"ids": [0]}, r"batch_dims of 'ids' is \[0\], and the batch has a list of 2"),
        ((IDS, AT), {"at": 1}, r"batch_dims is .*the batch has a tuple of 2"),
        (Pair(IDS, AT), {"target": 1}, r"names 'target', .*did you mean 'targets'"),
        ({"ids": IDS}, "rows", r"batch_dims is 'rows', and the batch has a dict"),
    ],
    ids=str,
)
def test_a_prefix_that_does_not_fit(batch: Any, dims: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_dims(batch, dims)


def test_a_later_batch_with_fewer_dims() -> None:
    with pytest.raises(UsageError, match=r"'at' has shape \[4\], and its batch dim is 1, by batch_dims"):
        marked({"at": torch.zeros(4)}, {"at": 1})


def test_containers_are_made_again_as_they_were() -> None:
    class Noted(Encoding):
        pass

    noted = Noted(ids=IDS)
    noted.__dict__["note"] = "kept"
    counted = defaultdict(list, ids=IDS)
    shown = types.MappingProxyType({"ids": IDS})
    batch = {
        "a": noted,
        "b": OrderedDict(ids=IDS),
        "c": counted,
        "d": shown,
        "e": Rows(IDS, AT),
        "f": Pair(IDS, 3),
    }
    made = tree.rebuilder(batch)([leaf + 1 for leaf in tree.flatten(batch).values()])
    assert [type(one) for one in made.values()] == [Noted, OrderedDict, defaultdict, dict, Rows, Pair]
    assert made["a"].note == "kept"
    assert made["c"]["new"] == []
    assert torch.equal(made["a"].ids, IDS + 1)
    assert torch.equal(noted.ids, IDS), "the batch itself stays as it is"
    assert torch.equal(made["e"].ids, IDS + 1)
    assert made["e"].scale == 2.0
    assert tree.fixed(batch) == {"e.scale": "2.0", "f.1": "3"}


def test_a_dataclass_without_tensors_is_a_constant() -> None:
    @dataclasses.dataclass
    class Options:
        beta: float = 0.1

    found = tree.fixed({"ids": IDS, "options": Options()})
    assert list(found) == ["options"]
    assert found != tree.fixed({"ids": IDS, "options": Options(0.2)})


def test_other_tensors_keep_the_marks() -> None:
    batch = with_dims({"ids": IDS, "at": AT, "one": stretto.replicated(ONE), "k": 1}, {"at": 1})
    made = tree.with_tensors(batch, lambda leaf: leaf.double())
    assert tree.said_dims(made) == (("at", 1),)
    assert tree.replicated_leaves(made) == ("one",)
    assert {leaf.dtype for leaf in tree.flatten(made).values()} == {torch.float64}

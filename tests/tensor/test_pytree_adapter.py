"""The private corner of PyTorch's trees is there, and keeps what is put into it."""

from __future__ import annotations

from stretto.tensor.pytree_adapter import tree_flatten, tree_leaves, tree_unflatten


def test_a_tree_comes_back_as_it_was() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = tree_flatten(tree)
    assert leaves == tree_leaves(tree) == [1, 2, None, 3]
    assert tree_unflatten(leaves, spec) == tree

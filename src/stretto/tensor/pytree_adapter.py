"""The room of `stretto.tensor` that knows PyTorch's trees of arguments (2.11 to 2.13), with a test.

What it uses: torch.utils._pytree, tree_flatten, tree_unflatten, tree_leaves and TreeSpec. Arguments of ops,
and what ops return, are flattened as the dispatcher flattens them.
"""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_unflatten"]

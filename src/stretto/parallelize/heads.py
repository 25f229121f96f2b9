"""Fewer heads of keys than ranks: which modules make them, and the integers that count them.

With K heads of keys and values on a multiple of K ranks, each rank has one full head, and `copies` ranks
the same one. How many heads a module makes is found so:

    1. The style says it: `colwise:K`.
    2. Beside it, in one attention module, is a wider colwise module (the queries), and counts of heads
       under usual names, of the attention module or of a config, fit both widths.
    3. Or the attention module says how wide a head is.

Of several heads of keys that a plan has replicated beside queries that it shards, a rank's queries would
read the wrong ones. One head that it has replicated is one that all ranks share. While the model is
captured, the attention module's own counts are those of a rank. Looks at modules, and changes none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.ir.axes import TENSOR
from stretto.parallelize.styles import ROWWISE, Style

AXIS = TENSOR

SPREAD = ("colwise", "packed_colwise")
"""Styles that leave a rank its output features."""

KEY_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "num_heads_kv", "num_heads_k", "num_key_heads"),
    *("num_query_groups", "n_key_value_heads", "n_kv_heads", "n_kv_head", "n_head_kv", "n_heads_kv"),
    *("n_query_groups", "kv_heads", "kv_n_heads", "nhead_kv", "multi_query_group_num"),
)
"""Names under which models count heads of keys and values."""

QUERY_HEADS = (
    *("num_attention_heads", "num_query_heads", "num_heads", "num_heads_q", "n_heads", "n_head"),
    *("n_query_heads", "nheads", "nhead", "heads"),
)

REPEATS = (
    *("num_key_value_groups", "num_kv_groups", "num_kv_repeats", "num_queries_per_kv", "queries_per_kv"),
    *("q_per_kv", "heads_per_group", "num_rep", "n_reps", "n_rep", "repeats"),
)
"""Names of how many heads of queries read one head of keys."""

WIDTHS = ("head_dim", "head_size", "dim_head", "dim_per_head", "d_head", "attention_head_size")
"""Names of how many features a head has."""

CONFIGS = ("config", "cfg", "args", "params")

ATTENTION = re.compile("att(n|ention)|mqa|gqa", re.IGNORECASE)
KEYS = re.compile(r"(^|_)w?(k|v|kv|keys?|values?|key_value)(_|$)", re.IGNORECASE)
"""Names of attention modules, and of what makes keys or values in one."""


class _HeadsOfAttention:
    """A module with a colwise matrix in it, and what is known about its heads."""

    def __init__(self, model: nn.Module, name: str, module: nn.Module, widest: int) -> None:
        """widest: output features of the widest of its colwise matrices."""
        self.name, self.module, self.widest = name, module, widest
        self.named = ATTENTION.search(f"{type(module).__name__} {name.rpartition('.')[2]}") is not None
        configs = [*_configs(module), *_configs(model)] if self.named else []
        self.said: list[Any] = [module, *configs]

    def queries(self) -> int:
        return next((n for n in (_integer(one, QUERY_HEADS) for one in self.said) if n), 0)

    def heads_of(self, width: int) -> tuple[int, int]:
        """Heads of keys in a matrix of so many output features, and of queries beside it; (0, 0) for one that
        makes none as far as anybody says."""
        wide, queries = self.widest, self.queries()
        if not 0 < width < wide:
            return 0, 0
        head = _integer(self.module, WIDTHS)
        for heads in filter(None, (_integer(one, KEY_HEADS) for one in self.said)):
            if width % heads == 0 and head in (0, width // heads):
                full = (queries or wide * heads // width) * (width // heads)
                # Of a known width, queries may be beside as many features of another kind (gates).
                if (wide % full if head else wide - full) == 0:
                    return heads, full // (width // heads)
        if head and width % head == 0 and wide % width == 0:
            return width // head, queries or wide // head
        return 0, 0

    def counts(self, heads: int, queries: int, size: int) -> dict[str, int]:
        """Its own integers that count heads, as they are on a rank with one head of keys."""
        local = queries // size
        kinds = ((KEY_HEADS, heads, 1), (QUERY_HEADS, queries, local), (REPEATS, queries // heads, local))
        own = {name: value for name, value in vars(self.module).items() if type(value) is int and value}
        return {name: here for names, full, here in kinds for name in names if own.get(name) == full}


def shared_heads(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, Style], size: int
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """What ranks share: module -> ranks that have the same of its output features, more than one; and their
    attention module -> integer attribute -> the value on a rank. Some of the modules have no style, or one
    that makes their output full, and are to be 'colwise'.

    Raises UsageError where heads of keys cannot be sharded, with what can be done."""
    copies: dict[str, int] = {}
    counts: dict[str, dict[str, int]] = {}
    unknown: list[_HeadsOfAttention] = []
    widest: dict[str, int] = {}  # of modules with colwise matrices directly in them
    for name, style in styles.items():
        if style.kind in SPREAD:
            parent = name.rpartition(".")[0]
            widest[parent] = max(widest.get(parent, 0), _features(modules[name]) // style.blocks)
    for parent, width in widest.items():
        attention, known = _HeadsOfAttention(model, parent, modules[parent], width), False
        for leaf, module in attention.module.named_children():
            name = f"{attention.name}.{leaf}" if attention.name else leaf
            style = styles.get(name, Style("replicated"))
            sharded = style.kind in SPREAD
            if not sharded and (KEYS.search(leaf) is None or style.kind in ROWWISE):
                continue
            _refuse_packed(attention, name, module, style)
            heads, queries = _heads(attention, name, module, style)
            if not heads:
                continue
            known = True
            if sharded and heads % size == 0:
                continue
            if not sharded and heads > 1:
                raise UsageError(
                    f"{name} makes {heads} heads of keys or values that every rank would have replicated, "
                    f"but the queries beside it are sharded over {AXIS} = {size}, and a rank's would read "
                    "the wrong heads: give it the style 'colwise' in tp_plan (shared heads are copied)"
                )
            if size % heads or queries % size:
                message = f" for {queries} of queries" if queries else ""
                raise UsageError(
                    f"{name} makes {heads} heads of keys or values{message}, which cannot be sharded over "
                    f"{AXIS} = {size}: each rank has full heads, so give {_fitting(heads, queries, size)}"
                )
            copies[name] = size // heads
            counts.setdefault(attention.name, {}).update(attention.counts(heads, queries, size))
        if not known:
            unknown.append(attention)
    for attention in unknown:
        for heads in (_integer(one, KEY_HEADS) for one in (attention.said if attention.named else ())):
            if heads % size:
                raise UsageError(
                    f"{attention.name} has {heads} heads of keys, which is no multiple of {AXIS} = {size}, "
                    "and none of its modules is known to make them: name those that do, tp_plan={..., "
                    f"'{attention.name}.k': 'colwise:{heads}'}}, or give a {AXIS} that divides {heads}"
                )
    return copies, counts


def _heads(attention: _HeadsOfAttention, name: str, module: nn.Module, style: Style) -> tuple[int, int]:
    """Heads of keys that a module makes, and of queries beside them; 0 where no one says."""
    width = _features(module) // style.blocks
    if not style.heads:
        return attention.heads_of(width)
    if not width or width % style.heads:
        raise UsageError(
            f"{name}: {width} output features are not {style.heads} equal heads: name as many in "
            "colwise:K as its weight has"
        )
    queries = attention.widest * style.heads // width if attention.widest > width else 0
    return style.heads, queries


def _fitting(heads: int, queries: int, size: int) -> str:
    sizes = range(1, (queries or 2 * max(heads, size)) + 1)
    fits = [n for n in sizes if (heads % n == 0 or n % heads == 0) and queries % n == 0]
    nearest = [n for n in fits if n < size][-1:] + [n for n in fits if n > size][:1]
    return f"{AXIS} = {' or '.join(map(str, nearest))}"


def _refuse_packed(attention: _HeadsOfAttention, name: str, module: nn.Module, style: Style) -> None:
    heads = next((n for n in (_integer(one, KEY_HEADS) for one in attention.said) if n), 0)
    queries = attention.queries()
    if style.kind != "packed_colwise" or not 0 < heads < queries:
        return
    weight = module.weight
    assert isinstance(weight, Tensor)
    head = _integer(attention.module, WIDTHS) or weight.numel() // _features(module) // queries
    if _features(module) == (queries + 2 * heads) * head:
        raise UsageError(
            f"{name}: {queries} heads of queries and 2 x {heads} of keys and values in one matrix are not "
            f"{style.blocks} equal blocks: give it the style 'colwise_gather_output', and the matrix behind "
            "the attention 'rowwise_split_input'; or make queries, keys and values in matrices of their own"
        )


def _features(module: nn.Module) -> int:
    shape = getattr(getattr(module, "weight", None), "shape", ())
    if len(shape) != 2:
        return 0
    return int(shape[1 if type(module).__name__ == "Conv1D" else 0])


def _configs(module: nn.Module) -> Iterator[Any]:
    for key in CONFIGS:
        config = getattr(module, key, None)
        if config is not None and not isinstance(config, nn.Module):
            yield config
            if getattr(config, "text_config", None) is not None:
                yield config.text_config


def _integer(said: Any, names: tuple[str, ...]) -> int:
    """The first of these that is a positive integer; 0 without."""
    values = (said.get(n) if isinstance(said, Mapping) else getattr(said, n, None) for n in names)
    return next((value for value in values if type(value) is int and value > 0), 0)

"""The part of a model between whose modules sequence parallelism keeps slices of the sequence.

    1. The blocks are the one list of modules that has the rowwise modules (of nested ones the outermost).
       Each is a module that is called.
    2. Modules of a block in which colwise modules are (attention, MLP) gather their input; what is in them
       sees full sequences.
    3. Every other module of a block with parameters must have a style, or be a norm, which works on every
       token alone.
    4. The norm after the blocks is where the sequence is put together again.

Reads names and classes of modules; changes nothing but the styles that it completes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from stretto.errors import UsageError
from stretto.parallelize.styles import COLWISE, EXPERTS, ROWWISE, Style


def sequence_region(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: dict[str, Style]
) -> tuple[str, tuple[str, ...]]:
    """The first block and the norms beside the blocks; these are the list that has the rowwise modules."""
    rowwise = [name for name, style in styles.items() if style.kind in ROWWISE]
    lists = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and any(r.startswith(f"{name}.") for r in rowwise)
    }
    inner = {name for name in lists if any(name.startswith(f"{other}.") for other in lists)}
    lists = {name: module for name, module in lists.items() if name not in inner}
    if len(lists) != 1:
        raise UsageError(
            f"sequence_parallel needs one list of blocks with rowwise modules in it; {type(model).__name__} "
            f"has {', '.join(lists) or 'none'}: give the blocks' output projections the style 'rowwise' in "
            "tp_plan, in one nn.ModuleList, or leave sequence_parallel out"
        )
    ((name, blocks),) = lists.items()
    _check_blocks(name, blocks)
    inside = full_inside(name, styles)
    for part, module in blocks.named_modules(prefix=name, remove_duplicate=False):
        own = list(module.parameters(recurse=False))
        sees_all = any(part.startswith(f"{parent}.") for parent in inside)
        if not own or (part in styles and styles[part].kind != "replicated"):
            continue
        if not sees_all and not _is_norm(module):
            raise UsageError(
                f"sequence_parallel: {part} ({type(module).__name__}) has no style, and would see a slice of "
                "the sequence: name it in tp_plan ('colwise', 'rowwise', or 'sequence' if it works on every "
                "token alone)"
            )
        # A norm in attention (of queries, of keys) sees full sequences.
        styles[part] = Style("replicated" if sees_all else "sequence")
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    children = [prefix + child for child, _ in modules[parent].named_children()]
    after = tuple(
        child
        for child in children
        if child != name
        and ((child in styles and styles[child].kind == "sequence") or _is_norm(modules[child]))
    )
    if not after or len(blocks) == 0:
        raise UsageError(
            f"sequence_parallel: no norm follows the blocks {name!r}, at which the sequence could be put "
            "together again: give the module that comes after them the style 'sequence' in tp_plan, or leave "
            "sequence_parallel out"
        )
    styles.update(dict.fromkeys(after, Style("sequence")))
    return f"{name}.0", after


def _check_blocks(name: str, blocks: nn.ModuleList) -> None:
    """Raises UsageError for blocks that no one can call: the sequence is cut where they are called."""
    for at, block in blocks.named_children():
        if getattr(type(block), "forward", None) is nn.Module.forward and "forward" not in vars(block):
            raise UsageError(
                f"sequence_parallel: the block {name}.{at} is a {type(block).__name__}, which has no "
                "forward, and the sequence is cut where a block is called: give the blocks a forward of "
                "their own, or leave sequence_parallel out"
            )


def full_inside(blocks: str, styles: Mapping[str, Style]) -> list[str]:
    """Modules of a block (attention, MLP) that gather their input, because colwise modules in them need it.

    They gather it, and not the colwise modules: their code may look at its shape before it calls them. So do
    modules with experts in them. Of modules within each other the outermost gathers. Raises UsageError for
    colwise modules that are in no such module.
    """
    result: dict[str, None] = {}
    for name, style in styles.items():
        if style.kind in (*COLWISE, EXPERTS) and name.startswith(f"{blocks}."):
            parent = name.rpartition(".")[0]
            if parent.count(".") == blocks.count(".") + 1:
                raise UsageError(
                    f"sequence_parallel: {name} is directly in its block, whose code would see a slice "
                    "of the sequence: put it in a module of its own (attention, MLP), which then gathers its "
                    "input"
                )
            result[parent] = None
    return [name for name in result if result.keys().isdisjoint(_around(name))]


def _around(name: str) -> Iterator[str]:
    """The modules that a module is in, by name, the innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def mixtures(gathering: Sequence[str], styles: Mapping[str, Style]) -> list[str]:
    """Which of them have experts in them: what else is in these sees full sequences, and makes the same of
    them on all ranks (a router), while experts make partials."""
    experts = [name for name, style in styles.items() if style.kind == EXPERTS]
    return [name for name in gathering if any(inner.startswith(f"{name}.") for inner in experts)]


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("norm") or isinstance(module, nn.LayerNorm)

"""What must be true before a rank runs: model and batch fit the plan, and all ranks have the same plan.

Numbers of a batch that name a row or a class are checked: one that is out of range would end a step inside
an op on processors, and end the process on accelerators.

    1. The ops state which values are such numbers (`stretto.ir.integers.numbers_read`).
    2. The full leaf is checked, in one pass: where it is in range, so is every part of it.
    3. Where it is not, the very value is computed that the op reads.

Leaves on an accelerator are not checked: that would wait for it. Labels over a vocabulary that
tensor-parallel ranks share are compared by other ops (`stretto.passes.layout.losses`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stretto.batch import tree
from stretto.batch.dims import marked, shape_given
from stretto.errors import RunError, StrettoError, UsageError
from stretto.ir.integers import NumbersRead
from stretto.ir.plan import Plan
from stretto.ir.program import Job, TensorSpec
from stretto.ir.serialize import plan_to_text
from stretto.runtime.counting import Alone
from stretto.runtime.transport import Transport


def fit_batch(
    job: Job, batch: Any, device: torch.device, numbers: Sequence[NumbersRead] = ()
) -> dict[str, torch.Tensor]:
    """The batch's leaves on `device`, in the captured dtype and layout, in the plan's order.

    Floating-point leaves may have another floating-point dtype than was captured, and are converted: the
    capture itself does so (`precision="bf16"`). Raises UsageError for leaves that are missing, too many, of
    another shape, or of another kind of dtype; for constants of the captured batch (numbers, strings) that
    have changed: they are part of the plan; and for `numbers` out of range, which are looked at as they are
    given: on processors one need not wait for.
    """
    dims = dict(job.batch_dims)
    batch = marked(batch, dims)
    given, given_replicated = tree.flatten(batch), tree.replicated_leaves(batch)
    expected = dict(job.batch)
    _check_marks(job, batch, given, given_replicated)
    if given.keys() != expected.keys():
        raise UsageError(
            f"the batch has leaves {', '.join(given) or 'none'}; the plan was made for {', '.join(expected)}"
        )
    constants = tree.fixed(batch)
    known = dict(job.fixed)
    for path in {**constants, **known}:
        if constants.get(path) != known.get(path):
            raise UsageError(
                f"batch leaf {path!r} is {constants.get(path, 'missing')}, but the plan was captured with "
                f"{known.get(path, 'none')}: leaves that are no tensors are constants of the plan. Mark what "
                "changes stretto.replicated(x), in the captured batch too, or capture again"
            )
    leaves: dict[str, torch.Tensor] = {}
    for name, spec in expected.items():
        leaf = given[name]
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise UsageError(
                f"batch leaf {name!r} is a sparse or nested tensor; the plan was made for a dense one"
            )
        if job.trains:
            tree.check_no_gradient(name, leaf)
        full = name in job.replicated
        want = spec.shape if full else (spec.shape[0] * job.pieces, *spec.shape[1:])
        if tuple(leaf.shape) != want:
            how = "in full for each microbatch" if full else f"{job.pieces} microbatches of {spec.shape[0]}"
            has, wants = (list(shape_given(tuple(one), dims.get(name))) for one in (leaf.shape, want))
            raise UsageError(
                f"batch leaf {name!r} has shape {has}; the plan was made for {wants} "
                f"({how}): every batch must have that shape. A Runner may have several plans: "
                "runner.add(stretto.plan(job.with_batch(batch), ...))"
            )
        dtype = getattr(torch, spec.dtype)
        # An integer is taken for the floating-point number that every microbatch is given, as in Python.
        converts = leaf.is_floating_point() or (full and not leaf.dim() and not leaf.is_complex())
        if leaf.dtype is not dtype and not (dtype.is_floating_point and converts):
            raise UsageError(f"batch leaf {name!r} is {leaf.dtype}; the plan was made for {dtype}")
        # Ops were captured for contiguous leaves: a view of a slice of tokens must not reach them.
        leaves[name] = leaf.to(device, dtype).contiguous()
    for use in numbers:
        _check_range(job, use, given[use.leaf])
    return leaves


def _check_marks(
    job: Job, batch: Any, given: Mapping[str, torch.Tensor], given_replicated: Collection[str]
) -> None:
    numbers = tree.fixed(batch)
    for name, _ in job.batch:
        marked, captured = name in given_replicated, name in job.replicated
        if marked != captured and (name in given or name in numbers):
            was, now = (" not", "") if marked else ("", " not")
            raise UsageError(
                f"batch leaf {name!r} is{now} marked stretto.replicated, but was{was} when the plan was "
                "captured: "
                "give every batch the marks of the captured one, or capture again"
            )


def agree(plan: Plan, transport: Transport, seed: int) -> None:
    """All ranks must have the same plan and seed. A plan that each rank measured alone differs, and would
    hang or mix up messages. Raises UsageError on every rank."""
    # What the model's code read may be a rank's own: its number, a path.
    shared = replace(plan, job=replace(plan.job, read=()))
    digest = hashlib.sha256(f"{seed}\n{plan_to_text(shared)}".encode()).hexdigest()[:12]
    result = transport.all_gather(digest)
    if len(set(result)) > 1:
        shown = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(result))
        raise UsageError(
            f"the ranks have different plans or seeds ({shown}): plan on one rank and load the file on all, "
            "or call stretto.plan on all ranks after init_process_group, which agrees on the costs"
        )


def check_ties(job: Job, given: Mapping[str, nn.Parameter]) -> None:
    """One tensor must not have two ties of the plan, nor two tensors one: copies would drift apart.

    Names of other ranks' stages count, too, because a tie may join ranks; not those on the meta device,
    which show nothing of what those ranks have.
    """
    first: dict[int, tuple[str, str]] = {}
    tied: dict[str, tuple[str, nn.Parameter]] = {}
    for parameter in job.parameters:
        result = given.get(parameter.name)
        if result is None:
            continue
        name, tie = first.setdefault(id(result), (parameter.name, parameter.tied_to))
        if tie != parameter.tied_to:
            raise UsageError(
                f"{name!r} and {parameter.name!r} are one tensor in this model, but two in the model "
                "that was captured: capture this model again"
            )
        if result.is_meta:
            continue
        name, same = tied.setdefault(parameter.tied_to, (parameter.name, result))
        if same is not result:
            raise UsageError(
                f"{name!r} and {parameter.name!r} are two tensors in this model, but one in the model "
                "that was captured: tie them again before making a Runner (model.to_empty(device=...) "
                "unties them)"
            )


def check_tensor(
    rank: int,
    name: str,
    result: torch.Tensor | None,
    spec: TensorSpec,
    compute_dtype: str | None,
    empty: bool = False,
) -> None:
    """What the model has under a name is what the plan's stage on this rank uses. empty: it may be on "meta".
    Raises UsageError."""
    kind = type(result).__name__.lower()
    if result is None:
        raise UsageError(
            f"the plan's stage on rank {rank} uses {name!r}, which the model does not have: "
            "give the model that was captured, or capture this one"
        )
    if result.is_meta and not empty:
        raise UsageError(
            f"{kind} {name!r} is on the meta device and has no values: initialise the model "
            "(model.to_empty(device=...), tie again what was tied, then its init) before making a Runner, or "
            "give its parameters values after (Runner(..., empty=True))"
        )
    dtype = str(result.dtype).removeprefix("torch.")
    fits = dtype == spec.dtype or (compute_dtype == spec.dtype and result.dtype.is_floating_point)
    if tuple(result.shape) != spec.shape or not fits:
        raise UsageError(
            f"{kind} {name!r} is {dtype}{list(result.shape)}, but the plan was made for "
            f"{spec.dtype}{list(spec.shape)}: capture this model again"
        )


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Files of token ids have them; PyTorch can keep and convert them, and little else."""


def _check_range(job: Job, use: NumbersRead, leaf: torch.Tensor) -> None:
    """leaf: of the full batch, as the user gave it. Raises UsageError with leaf, number and range."""
    if leaf.device.type != "cpu" or not leaf.numel() or _wrong(use, leaf) is None:
        return
    read = Alone(job, use.ops, use.value, torch.device("cpu")) if use.ops else None
    for at, part in enumerate((leaf,) if use.leaf in job.replicated else leaf.chunk(job.pieces)):
        wrong = _wrong(use, part if read is None else read(part))
        if wrong is not None:
            rest = f", or {use.ignored}, which does not count" if use.ignored is not None else ""
            raise UsageError(
                f"batch leaf {use.leaf!r} has {int(wrong[0])} (microbatch {at}), and {use.what}: give "
                f"numbers from 0 to {use.count - 1}{rest}"
            )


def _wrong(use: NumbersRead, values: torch.Tensor) -> torch.Tensor | None:
    """Step 2: those that are out of range."""
    if values.dtype in UNSIGNED:
        values = values.long()
    least, most = values.aminmax()
    if int(least) >= 0 and int(most) < use.count:
        return None
    wrong = (values < 0) | (values >= use.count)
    if use.ignored is not None:
        wrong &= values != use.ignored
    return values[wrong] if bool(wrong.any()) else None


@contextmanager
def explaining_failed_ops(rank: int) -> Iterator[None]:
    """What PyTorch raises for ops whose arguments do not fit each other, as in a plan that was edited: proofs
    of a plan do not know the rules of every operator."""
    try:
        yield
    except StrettoError:
        raise
    except Exception as error:
        said = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        raise RunError(
            f"rank {rank} cannot compute what the plan says: {said}. An op does not fit its arguments, or "
            "needs more memory than there is: plan again from the model"
        ) from error


def check_shares(plan: Plan, trained: Plan) -> None:
    """Raises UsageError, on all ranks, where the plan has a parameter on other ranks than the one that is
    trained, or as other parts."""
    theirs = pipeline_ranks(trained)
    parts = {p.tied_to: (p.shards, p.kept, p.slot) for p in trained.job.parameters}
    ranks = pipeline_ranks(plan)
    for p in plan.job.parameters:
        tie, own = p.tied_to, (p.shards, p.kept, p.slot)
        if ranks[tie] and (not ranks[tie] <= theirs.get(tie, set()) or own != parts[tie]):
            raise UsageError(
                f"shares: the plan has {p.name!r} on other ranks than the Runner that it shares with, "
                "or shards it otherwise: capture both with the same layout and the same split"
            )


def pipeline_ranks(plan: Plan) -> dict[str, set[int]]:
    """First name of a tie -> the pipeline ranks that have a copy."""
    ranks: dict[str, set[int]] = {}
    for p in plan.job.parameters:
        ranks.setdefault(p.tied_to, set()).update(map(plan.rank_of, p.stages))
    return ranks

"""What must hold before a rank runs: the batch fits the plan, and all ranks hold the same plan."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from stretto import tree
from stretto.errors import UsageError
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.serialize import plan_to_text
from stretto.runtime.transport import Transport


def fit_batch(job: Job, batch: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """The batch's leaves on `device`, in the captured dtype and layout, in the plan's order.

    Floating-point leaves may have another floating-point dtype than was captured, and are converted: the
    capture itself does so (`precision="bf16"`). Raises UsageError for leaves that are missing, too many, of
    another shape, or of another kind of dtype; and for constants of the captured batch (numbers, strings)
    that have changed: they are part of the plan.
    """
    given = tree.flatten(batch)
    expected = dict(job.batch)
    if given.keys() != expected.keys():
        raise UsageError(
            f"the batch has leaves {', '.join(given) or 'none'}; the plan was made for {', '.join(expected)}"
        )
    constants = tree.fixed(batch)
    known = dict(job.fixed)
    for path, text in constants.items():
        if path not in known:
            raise UsageError(
                f"batch leaf {path!r} is {text}, and the batch that was captured did not have it: leaves "
                "that are no tensors are constants of the plan. Leave it out, or capture anew with it"
            )
    for path, text in job.fixed:
        if constants.get(path) != text:
            raise UsageError(
                f"batch leaf {path!r} is {constants.get(path, 'missing')}, but the plan was captured with "
                f"{text}: leaves that are no tensors are constants of the plan. Make it a tensor, "
                "or capture anew"
            )
    leaves: dict[str, torch.Tensor] = {}
    for name, spec in expected.items():
        leaf = given[name]
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise UsageError(
                f"batch leaf {name!r} is a sparse or nested tensor; the plan was made for a dense one"
            )
        pieces = job.microbatches * job.size("dp")
        want = (spec.shape[0] * pieces, *spec.shape[1:])
        if tuple(leaf.shape) != want:
            raise UsageError(
                f"batch leaf {name!r} has shape {list(leaf.shape)}; the plan was made for {list(want)} "
                f"({pieces} microbatches of {spec.shape[0]}): every batch must have that shape"
            )
        dtype = getattr(torch, spec.dtype)
        if leaf.dtype is not dtype and not (leaf.is_floating_point() and dtype.is_floating_point):
            raise UsageError(f"batch leaf {name!r} is {leaf.dtype}; the plan was made for {dtype}")
        # Ops were captured for contiguous leaves: a view of a slice of tokens must not reach them.
        leaves[name] = leaf.to(device, dtype).contiguous()
    return leaves


def agree(plan: Plan, transport: Transport, seed: int) -> None:
    """All ranks must hold the same plan and seed. A plan that each rank measured alone differs, and would
    hang or mix up messages. Raises UsageError on every rank."""
    digest = hashlib.sha256(f"{seed}\n{plan_to_text(plan)}".encode()).hexdigest()[:12]
    found = transport.all_gather(digest)
    if len(set(found)) > 1:
        told = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))
        raise UsageError(
            f"the ranks hold different plans or seeds ({told}): plan on one rank and load the file on all, "
            "or call stretto.plan on all ranks after init_process_group, which agrees on the costs"
        )

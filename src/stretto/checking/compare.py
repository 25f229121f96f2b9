"""Check: does the step that a layout makes of a model compute what the plain model computes?

Plans are proved by rules for ops. This check has none: the step is run, once, and compared.

    1. The model is copied in float64; rounding then is far below any mistake. What draws random numbers
       while it trains is put into evaluation.
    2. The plain model: loss and gradients of every microbatch, one after the other.
    3. The same batch through capture, plan and Runner, on ranks that are threads of this process.
    4. Each gradient, put together from its parts, is compared with the plain one. Where ranks have copies,
       each is compared.
    5. When something differs, the step is tried on one rank: a model that differs there computes something
       else when it runs again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from stretto.batch import tree
from stretto.batch.dims import with_dims
from stretto.batch.loss import Loss, loss_alone, loss_and_count
from stretto.capturing import capture
from stretto.capturing.state import PythonState
from stretto.config import ParallelSettings
from stretto.errors import RunError, StrettoError, UsageError
from stretto.ir.action import Phase
from stretto.ir.collectives import PRICED
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.forms import differing, forms_of, nouns, number
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.planning.make_plan import make_plan
from stretto.runtime.local import run_threads
from stretto.runtime.rank_tensors import join
from stretto.runtime.runner import Runner

TOLERANCE = 1e-9
"""Largest relative difference by default. Measured: sums in another order differ by 2e-15 in small models."""
LOW_PRECISION_TOLERANCE = 1e-4
"""The same where the model's own code computes gradients in float32 or less, whatever it is given. Measured:
1e-5 in Qwen3.5's linear attention."""
NEGLIGIBLE = 1e-6
"""A gradient's norm over that of all, below which it counts as this much: one that is zero but for rounding
(the bias of keys, which softmax cancels) has no relative precision. Assumed."""
MAX_RANKS = 64
"""Assumed: as many threads as a machine still carries."""
LISTED = 8
"""How many differences a message lists."""
ONE_RANK = {
    key: ParallelSettings.model_fields[key].default
    for key in (
        *("pp", "dp", "zero", "dp_shard", "ep", "ep_buffer", "ep_overflow"),
        *("ampipe_degree", "ampipe_capacity", "tp", "tp_plan"),
        *("sequence_parallel", "pipe_experts", "pipe_experts_multi_data"),
    )
}
"""Settings of a step on one rank that is cut in nothing but microbatches."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one parameter's gradient, or of `loss`: the norm of the difference over the plain one's norm."""

    name: str
    relative: float


@dataclass(frozen=True, slots=True)
class Check:
    """A step compared with the plain model's: of the loss, and of every gradient, largest difference first.

    evaluated: the model draws random numbers in training, and was compared in evaluation. whole_capacity: it
    was compared with `ampipe_capacity` "whole", since with "chunk" the layout means another step.
    forms: in which forms of the step it was compared, where planning may choose; differences are the largest.
    """

    loss: float
    plain_loss: float
    differences: tuple[Difference, ...]
    tolerance: float
    world: int
    evaluated: bool = False
    whole_capacity: bool = False
    forms: str = ""

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """What differs by more than the tolerance (NaN does)."""
        return tuple(d for d in self.differences if not d.relative <= self.tolerance)

    def __str__(self) -> str:
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        lines = [
            f"loss {self.loss:.12g} on {ranks}, {self.plain_loss:.12g} of the plain model",
            f"{len(self.wrong)} of {len(self.differences)} values (the loss, gradients) differ by more than "
            f"{self.tolerance:.0e}; largest differences:",
            *(f"  {d.relative:8.1e}  {d.name}" for d in self.differences[:LISTED]),
        ]
        if self.evaluated:
            lines.append("compared in evaluation, since the model draws random numbers in training")
        if self.forms:
            lines.append(f"compared in {self.forms}: planning takes one of them")
        if self.whole_capacity:
            lines.append(
                "compared with ampipe_capacity = 'whole', since with 'chunk' each chunk of a sequence has "
                "its own share of an expert's capacity, and other tokens are dropped than without chunks"
            )
        return "\n".join(lines)


def check(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    parallel: ParallelSettings,
    *,
    tp_plan: Mapping[str, Any] | None = None,
    batch_dims: Any = 0,
    tolerance: float | None = None,
) -> Check:
    """Compare one step of the job that `parallel` makes with the plain model's, in float64, in this process.

    model: with values, not on "meta"; every rank gets a copy, so few layers are best. batch, loss, tp_plan,
    batch_dims: as for `stretto.capture`; the batch should be small, with two or more rows a microbatch.
    tolerance: the largest relative difference (by norm) of the loss and of each gradient; by default 1e-9, or
    1e-4 where the model's own code computes gradients in float32.

    Raises RunError that names the gradients that differ, and whether the layout makes them; UsageError and
    CaptureError as `capture` does, and for a model that cannot be compared.
    """
    if parallel.world > MAX_RANKS:
        raise UsageError(
            f"the check runs all ranks in this process, and {parallel.world} are too many (at most "
            f"{MAX_RANKS}): check with smaller dp and pp, which do not change what is sharded"
        )
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "the model is on the meta device and has no values to compute with: build it on the CPU"
        )
    batch = with_dims(batch, batch_dims)
    compared = _compare(model, batch, loss, parallel, tp_plan, tolerance)
    if not compared.wrong:
        return compared
    if parallel.ampipe_degree != 1 and parallel.ampipe_capacity == "chunk":
        # Where experts have a capacity, this differs by design.
        unsharded = parallel.model_copy(update={"ampipe_capacity": "whole"})
        other = _compare(model, batch, loss, unsharded, tp_plan, tolerance)
        if not other.wrong:
            return replace(other, whole_capacity=True)
    used = {key: value for key, value in ONE_RANK.items() if getattr(parallel, key) != value}
    one = parallel.model_copy(update={**used, "split": "auto"})
    one = one.model_copy(update={"microbatches": parallel.microbatches * parallel.dp})
    try:
        right = bool(used) and not _compare(model, batch, loss, one, None, tolerance).wrong
    except (StrettoError, RuntimeError):
        right = False
    differing = " or ".join(f"{key} = {getattr(parallel, key)!r}" for key in used)
    if right:
        line = f"on one rank it is right: {differing} makes the difference, and must not: report the model"
    else:
        line = (
            "on one rank it differs, too: the model computes something else when it runs again (a state of "
            "its own that is no buffer, a value kept from one call to the next), or the capture is at fault"
        )
    raise RunError(f"the step is not the plain model's\n{compared}\n{line}")


def _compare(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    parallel: ParallelSettings,
    tp_plan: Mapping[str, Any] | None,
    tolerance: float | None,
) -> Check:
    """Steps 1 to 4. Gradients are compared, so no optimizer takes them."""
    parallel = parallel.model_copy(update={"updates": False, "clip_norm": None})
    if isinstance(parallel.recompute, int):
        # A limit is meant for the real batch; what it may lead to at the most is this.
        parallel = parallel.model_copy(update={"recompute": "full"})
    plain, doubled, evaluated = _copied(model).cpu().double(), _doubled(batch), False
    job = capture(plain, doubled, loss, parallel, tp_plan=tp_plan)
    if _draws(job):
        plain, evaluated = plain.eval(), True
        job = capture(plain, doubled, loss, parallel, tp_plan=tp_plan)
        if _draws(job):
            raise UsageError(
                f"{type(model).__name__} draws random numbers in evaluation too, differently on ranks and in "
                "the plain model: check it with its dropout set to 0"
            )
    if tolerance is None:
        tolerance = LOW_PRECISION_TOLERANCE if _low_precision(job) else TOLERANCE
    value, expected = _plain(plain, doubled, loss, parallel.microbatches * parallel.dp)
    if not math.isfinite(value):
        raise UsageError(
            f"the plain model's loss is {value}: give a batch and weights with which it is finite"
        )
    forms = forms_of(job)
    compared = []
    for one in forms:
        plan = make_plan(one, _costs(one), order="list")
        own, differences = _differences(plan, plain, doubled, expected)
        compared.append((own, [*differences, Difference("loss", abs(own - value) / max(abs(value), 1e-300))]))
    worst_loss, _ = max(compared, key=lambda one: _size(one[1][-1]))
    worst = [
        max(of_one, key=_size) for of_one in zip(*(differences for _, differences in compared), strict=True)
    ]
    order = tuple(sorted(worst, key=_size, reverse=True))
    differ = differing(forms)
    *some, last = (number(one, differ) for one in forms)
    form_words = f"{', '.join(some)} and {last} {nouns(differ)}" if some else ""
    return Check(worst_loss, value, order, tolerance, parallel.world, evaluated, forms=form_words)


def _copied(model: nn.Module) -> nn.Module:
    """Step 1. Tensors of an earlier call that are in attributes, which PyTorch does not copy, are cut off."""
    known = PythonState(("", model)).tensors()
    memo = {key: tensor.detach().clone() for key, tensor in known.items() if not tensor.is_leaf}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and the check runs "
            "copies of it: give it no attribute that copy.deepcopy refuses"
        ) from error


def _size(difference: Difference) -> float:
    """To compare by: NaN counts as the largest."""
    return math.inf if math.isnan(difference.relative) else difference.relative


def _doubled(batch: Any) -> Any:
    """Step 1 for the batch."""

    def double(leaf: Tensor) -> Tensor:
        leaf = leaf.detach().cpu()
        return leaf.double() if leaf.is_floating_point() else leaf

    return tree.with_tensors(batch, double)


def _draws(job: Job) -> bool:
    return any(op.random for stage in job.stages for ops in stage.ops.values() for op in ops)


def _low_precision(job: Job) -> bool:
    """Whether gradients are computed in less than float64. (A table of angles in float32 is an input.)"""
    specs = [
        spec
        for stage in job.stages
        for phase in (Phase.I, Phase.W)
        for op in stage.ops[phase]
        for spec in op.outputs
    ]
    return any(spec is not None and spec.dtype in ("float32", "float16", "bfloat16") for spec in specs)


def _plain(model: nn.Module, batch: Any, loss: Loss, pieces: int) -> tuple[float, dict[str, Tensor | None]]:
    """Step 2: the mean of the microbatches' losses, or their sum over what they count, and each parameter's
    gradient (each tensor once)."""
    own, total, counted = copy.deepcopy(model), 0.0, 0.0
    unsharded = tree.replicated_leaves(batch)
    cut = [
        (leaf,) * pieces if n in unsharded else leaf.chunk(pieces) for n, leaf in tree.flatten(batch).items()
    ]
    for piece in range(pieces):
        microbatch = tree.rebuilder(batch)([part[piece] for part in cut])
        value, count = loss_and_count(loss(own, microbatch), loss)
        value.reshape(()).backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
        counted += 1.0 if count is None else float(count)
    counted = counted or math.nan
    trained = {name: p.grad for name, p in own.named_parameters() if p.requires_grad}
    return total / counted, {n: None if grad is None else grad / counted for n, grad in trained.items()}


def _costs(job: Job) -> Costs:
    """Made up, for nothing but an order: collectives take as long as an op, so that there is overlap."""
    op_us = {(s.index, op.name): 10.0 for s in job.stages for ops in s.ops.values() for op in ops}
    each = CollectiveCost(Curve(((0.0, 10.0), (1e12, 10.0))))
    collectives = {(axis, kind): each for axis, size in job.axes if size > 1 for kind in PRICED}
    return Costs(op_us, {}, Link(10.0, 1e6), 0.0, "made up", collectives)


def _differences(
    plan: Plan, model: nn.Module, batch: Any, expected: Mapping[str, Tensor | None]
) -> tuple[float, list[Difference]]:
    """Steps 3 and 4: the loss as ranks compute it, and the differences of gradients."""

    def work(runner: Runner) -> tuple[dict[str, int], float, dict[str, Tensor]]:
        value = float(loss_alone(runner.step(batch)))
        grads = {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}
        return runner.coordinates, value, grads

    results = run_threads(plan, lambda _: copy.deepcopy(model), work)
    parameters = {p.name: p for p in plan.job.parameters}
    full: dict[str, list[Tensor]] = {}  # by the first name of the tie
    sharded: dict[tuple[str, tuple[tuple[str, int], ...]], list[Tensor]] = {}
    for at, _, grads in results:
        for name, grad in grads.items():
            over = {shard.axis for shard in parameters[name].shards} | {*parameters[name].kept}
            if over:
                # Parts of one gradient are on ranks that differ along these axes alone.
                same = tuple((axis, rank) for axis, rank in at.items() if axis not in over)
                sharded.setdefault((name, same), []).append(grad)
            else:
                full.setdefault(parameters[name].tied_to, []).append(grad)
    for (name, _), parts in sharded.items():
        copies = max((shard.copies for shard in parameters[name].shards), default=1)
        full.setdefault(parameters[name].tied_to, []).extend(
            join(parts, parameters[name], plan.job, copy) for copy in range(copies)
        )
    norms = [float(grad.norm()) for grad in expected.values() if grad is not None]
    least = NEGLIGIBLE * sum(norm**2 for norm in norms) ** 0.5 or 1.0
    differences = []
    for name, want in expected.items():
        got = full.get(parameters[name].tied_to if name in parameters else name, [])
        relative = 0.0 if want is None and not got else math.inf
        if want is None:
            relative = max((float(g.norm()) for g in got), default=0.0) / least
        elif got:
            relatives = [float((g - want).norm()) / max(float(want.norm()), least) for g in got]
            relative = next((one for one in relatives if math.isnan(one)), max(relatives))
        differences.append(Difference(name, relative))
    values = [value for _, value, _ in results]
    return next((value for value in values if value != values[0]), values[0]), differences

"""`Runner`: one rank's part of a plan, as the public face of the runtime.

runner = Runner(plan, model)                       # under torchrun, after init_process_group
optimizer = torch.optim.AdamW(runner.parameters())
loss = runner.step(batch)                          # gradients are in .grad, as everywhere
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from stretto.backend.process_memory import keep_freed_memory
from stretto.errors import LostRankError, RunError, UsageError
from stretto.ir.metrics import Observed, one_after_another
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.runtime.compare import Report
from stretto.runtime.compile import make_compiler
from stretto.runtime.copies import check_copies
from stretto.runtime.fit import agree, fit_batch
from stretto.runtime.full_state import LeftKeys, PlainState, gather, plain_state, put
from stretto.runtime.given_model_adapter import check_given, take
from stretto.runtime.gradients import give, trained_of
from stretto.runtime.observed import check_room, observed
from stretto.runtime.optimizer_trial import watch
from stretto.runtime.plan_steps import PlanSteps, check_graph
from stretto.runtime.rank import RankState
from stretto.runtime.rank_tensors import RankTensors
from stretto.runtime.record import build_timeline
from stretto.runtime.shapes import PlanFor, Shape, agree_on_shape, check_same, find, no_plan, planned
from stretto.runtime.torch_transport import TorchTransport
from stretto.runtime.transport import ThreadTransport, Transport
from stretto.runtime.updates import MakeOptimizer, optimize_by, optimizer_of
from stretto.verifying import verify


class Runner:
    """Walks a plan's orders for this rank, step after step.

    Has the parameters and buffers of `model` that this rank's stages use: the model's own tensors, or where
    a parameter is sharded over ranks or kept in parts, a copy of this rank's part; of a model on meshes its
    part itself. What is kept in parts (`Parallel.zero`) are rows (dim 0) of what other axes leave a rank: as
    many on each, rounded up, fewer or none on the last. The model's values are the Runner's then: tensors of
    it that this rank does not train refuse to be read, written, frozen and hooked. The rest of the model may
    be dropped, but one whose own code makes values of its `state_dict` (`get_extra_state`, a hook) is kept.
    Gradients are added to `.grad`.

    plan: the plan; every rank must have an equal one. Several, of one layout, are for batches of several
    shapes, as `add` has it. model: the model that was captured, with its values,
    the same on all ranks; it must not be on "meta", but see `empty`. transport: how messages travel;
    `torch.distributed` by default. seed: random ops draw from (seed, step, microbatch, op), whatever the
    schedule. shares: another Runner on this rank, of a plan that shards the same model in the same way; its
    parts are used, so that this one reads what that one trains. empty: parameters may be on "meta", and
    buffers have values (`models.build.hollow`): this rank's parts get memory, so that none needs it for the
    full model, and no step is taken before values are loaded (`stretto.load`, `load_state_dict`). compile:
    "inductor" compiles stretches of compute between communications; it takes some seconds for each kind of
    stretch here, and results differ in rounding (`docs/accelerators.md`). cuda_graph: whether the step is
    recorded once, in the third, and then replayed (`stretto.runtime.step_graph`), so that the host need not
    queue it; on an accelerator, without dropout. optimizer: for a plan that updates parameters
    (`Parallel.updates`), makes an optimizer over the parameters that it is given, `self.optimizer` then: an
    ordinary one, for schedulers of its rate, for `stretto.save` and `load`. Steps update parameters, and
    leave no gradients. plan_for: a batch -> a plan for its shape, called on all ranks at the first step with
    a shape that no plan is for; the plan is kept (`docs/shapes.md`).

    Raises UsageError when the world has another size than the plan, the model does not fit the plan, ranks
    have different copies of a value, or there is no compiler; PlanError for a plan that was edited and cannot
    run; RunError when a rank is lost.
    """

    def __init__(
        self,
        plan: Plan | Sequence[Plan],
        model: nn.Module,
        *,
        transport: Transport | None = None,
        seed: int = 0,
        shares: Runner | None = None,
        empty: bool = False,
        compile: Literal["inductor"] | None = None,
        cuda_graph: bool = False,
        optimizer: MakeOptimizer | None = None,
        plan_for: PlanFor | None = None,
    ) -> None:
        plan, *further = plan if isinstance(plan, Sequence) and plan else (plan,)
        if not isinstance(plan, Plan):
            raise UsageError(f"Runner takes a plan, not {type(plan).__name__}: call stretto.plan(job) first")
        if plan.edited:
            verify(plan)
        self.plan = plan
        if transport is None:
            alone = plan.world == 1 and not torch.distributed.is_initialized()
            transport = ThreadTransport.group(1)[0] if alone else TorchTransport()
        self.transport: Transport = transport
        self.rank = self.transport.rank
        if self.transport.size != plan.world:
            raise UsageError(
                f"the plan is for {plan.world} ranks, but {self.transport.size} run: start as many processes "
                f"as the plan has ranks (torchrun --nproc-per-node {plan.world}), or plan again"
            )
        self._shares = shares
        self.tensors: RankTensors = RankTensors(
            plan, self.rank, model, None if shares is None else shares.tensors, empty or shares is not None
        )
        self.unfit: str | None = None
        if self.tensors.without_values:
            self.unfit = 'its model is on "meta": load values (stretto.load, load_state_dict)'
        check_given(self.tensors, model.named_parameters(remove_duplicate=False))
        own = self.tensors.known_parameters() if plan.job.trains else ()
        self._frozen = [(known.name, parameter) for known, parameter in own if known.frozen]
        self.plain_state: PlainState = plain_state(model, plan.job) if shares is None else shares.plain_state
        self.coordinates, self.device = self.tensors.coordinates, self.tensors.device
        self._nothing = nn.Parameter(torch.empty(0, device=self.device))
        if self.device.type != plan.job.device:
            raise UsageError(
                f"the plan was captured for {plan.job.device}, but the model is on {self.device}: kernels "
                f"differ. Capture with device={self.device.type!r}, or move the model"
            )
        if self.device.type == "cpu":
            keep_freed_memory()
        threads = plan.world > 1 and isinstance(self.transport, ThreadTransport)
        self.compiler = make_compiler(compile, self.device, threads)
        agree(plan, self.transport, seed)
        if not self._unfit():
            self.check_copies()
        self.tensors.full_tensors.clear()  # what this rank does not have may be dropped
        self._seed, self._threads = seed, threads
        self._graphs, self._plan_for = cuda_graph, plan_for
        if cuda_graph:
            check_graph(self.device, self.transport, plan.world)
        self._model = weakref.ref(model)
        self._plans: list[PlanSteps] = []
        self._shapes: list[Shape] = []
        self._now = self._begin(plan, self.tensors)
        if shares is None:
            watch(self.tensors)
            take(model, self.tensors, self.transport)
        self.optimizer = optimizer_of(plan, optimizer, [*self.parameters()], cuda_graph)
        if self.optimizer is not None:
            self.state.optimize = optimize_by(self.optimizer, self.tensors)
            self.state.trained = partial(trained_of, self.tensors)
        for one in further:
            self.add(one)

    # Plans.

    def add(self, plan: Plan) -> None:
        """Steps with batches of this plan's shape are taken by it, on the same parameters and with the same
        optimizer; every rank must call it. Memory is that of the plan that needs most, since a step leaves
        nothing; communicators that plans share are opened once.

        plan: of the same model and layout, `stretto.plan(job.with_batch(batch, like=runner.plan))`; it takes
        the place of one for the same shape.

        Raises UsageError that names what differs from the first plan.
        """
        if not isinstance(plan, Plan):
            raise UsageError(f"Runner.add takes a plan, not {type(plan).__name__}: call stretto.plan(...)")
        if plan.edited:
            verify(plan)
        check_same(self.plan, plan)
        agree(plan, self.transport, self._seed)
        self._begin(plan, self.tensors.for_plan(plan, self._model()))

    def _begin(self, plan: Plan, tensors: RankTensors) -> PlanSteps:
        begun = PlanSteps(plan, tensors, self.transport, self._seed, self.compiler, self._model())
        if self._plans and self.optimizer is not None:
            begun.state.optimize = self.state.optimize
            begun.state.trained = self.state.trained
        if self._graphs:
            begun.replay(self._plans[0].graph if self._plans else None)
        shape = Shape.of_job(plan.job)
        if shape in self._shapes:
            at = self._shapes.index(shape)
            begun.state.steps = self.state.steps
            self._plans[at] = begun
        else:
            self._shapes.append(shape)
            self._plans.append(begun)
        return begun

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those of all shapes, in the order in which they came; `plan` is the first."""
        return tuple(one.plan for one in self._plans)

    @property
    def plan_of_step(self) -> Plan:
        """The one that the last step took; before a step the first."""
        return self._now.plan

    @property
    def state(self) -> RankState:
        """Of the first plan, which counts the steps of all."""
        return self._plans[0].state

    # Parameters.

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once. A rank whose stages have none gives one without elements, since
        optimizers refuse to have nothing."""
        own = [parameter for _, parameter in self.named_parameters()]
        yield from own or [self._nothing]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the model, each once, in the model's order.

        A tied parameter has the first of its names, as in `model.named_parameters()`, on ranks too whose
        stages use it by a later one: what is chosen by name is then the same for all copies.
        """
        return self.tensors.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's buffers with their names in the model."""
        return self.tensors.named_buffers()

    def owns(self, name: str) -> bool:
        """Whether this rank is the one to count and save what it has of the parameter: the first of those
        that have the same.

        A tied parameter lives on several ranks, and data-parallel copies have all; a norm counts it once, and
        one copy is saved. Of a parameter with parts each rank owns its own, of ranks with the same part
        the first.
        """
        return name in self.tensors.owned

    # Values.

    def state_dict(self, *, only_on: int | None = None) -> dict[str, Any]:
        """What the plain model's `state_dict` would be, of the full trained model; every rank must call it.

        Copies on the processor, each tensor in full, tied keys one tensor; what the model's own code adds or
        renames (`get_extra_state`, hooks) too, as it is in this rank's model. only_on: the rank that gets
        them, the others {}; by default all do. For what is too large for one machine's memory there is
        `stretto.save`.
        """
        if self._shares is not None:
            return self._shares.state_dict(only_on=only_on)
        return gather(self.tensors, self.transport, self.plain_state, only_on)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LeftKeys:
        """Take values as the plain model's `state_dict` has them, in full, the same on every rank, which all
        must call it; optimizers keep their state. Of tied keys one is enough. Returns what was not loaded,
        `.missing_keys` and `.unexpected_keys`, which is nothing unless `strict` is False.

        Raises the same UsageError on all ranks, before anything is changed, for missing or unknown keys
        (unless not strict), other shapes, and values that ties forbid; after, for ranks with other values.
        """
        if self._shares is not None:
            return self._shares.load_state_dict(state_dict, strict)
        left = put(self.tensors, self.transport, self.plain_state, state_dict, strict)
        lacking = self.unfit if left.missing_keys else None
        self.loaded()
        self.unfit = lacking
        if lacking is None:
            self.check_copies()
        return left

    def loaded(self) -> None:
        """For who writes values into this rank's parameters: they are complete."""
        self.unfit = None

    def _unfit(self) -> str | None:
        """Why what this one has, or shares, is no complete model; None where it is."""
        return self.unfit or (None if self._shares is None else self._shares.unfit)

    def check_copies(self) -> None:
        """Raise UsageError on every rank when two have other values of the same; every rank must call it."""
        check_copies(self.tensors, self.transport)

    def close(self) -> None:
        """Give the communicators back. Every rank calls it; the runner cannot step after it."""
        self.transport.close()

    # Steps.

    def step(self, batch: Any) -> Any:
        """Forward and backward of one batch; gradients are added to `.grad`, or where the plan has updates,
        used by them. Returns the step's loss (0-d): the mean of the microbatches' losses, or their sum over
        what they count, of all data-parallel copies. Where the loss function returns metrics, (loss, metrics
        by name), the same on every rank (`stretto.batch.loss`).

        batch: a tree like the captured one; every rank is given the full batch and reads its part. With
        several plans its shape says which one the step takes; ranks compare it before the step.

        Raises UsageError for a batch whose leaves do not fit the plan, and where no plan is for its shape or
        ranks are given several; RunError when a rank is lost.
        """
        now = self._now = self._for(batch)
        leaves = fit_batch(now.plan.job, batch, self.device, now.numbers)
        self._check_ready(now)
        now.state.steps = self.state.steps  # draws go on as steps do
        loss = now.step(leaves)
        self.state.steps = now.state.steps
        grads, now.state.grads = now.state.grads, {}
        check_room(now.state.watch, self.transport)
        give(now.tensors, grads)
        return (loss, now.metrics.of_step()) if now.metrics else loss

    def _for(self, batch: Any) -> PlanSteps:
        """The plan of the batch's shape, which is made where it is asked for and there is none."""
        if len(self._plans) == 1 and self._plan_for is None:
            return self._plans[0]  # which refuses another shape in words
        wanted = Shape.of_batch(batch)
        agree_on_shape(self.transport, wanted)
        at = find(self._shapes, wanted)
        if at is None:
            if self._plan_for is None:
                raise no_plan(self._shapes, wanted)
            self.add(planned(self.transport, self._plan_for, batch, self._threads))
            at = find(self._shapes, wanted)
            if at is None:
                raise UsageError(
                    f"plan_for was given a batch of {wanted}, and its plan is for {self._shapes[-1]}"
                )
        return self._plans[at]

    def _check_ready(self, now: PlanSteps) -> None:
        """All that ops read is up to date."""
        if any(parameter.requires_grad for _, parameter in self._frozen):
            check_given(self.tensors, self._frozen)
        now.check()
        self.tensors.check_bound()
        if unfit := self._unfit():
            raise RunError(f"the Runner has no full values: {unfit}")

    # What happened.

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm (0-d) of all gradients of the last step, before they were clipped, on every rank. Raises
        UsageError for a plan that does not need it."""
        norm = self._now.state.norm
        if norm is None:
            raise UsageError(
                "the norm of gradients is known after a step of a plan that was captured with "
                "Parallel(updates=True, clip_norm=...), 0 to measure it alone; else "
                "stretto.train.clip.GradientClip returns it"
            )
        return norm

    @property
    def replayed(self) -> bool:
        """Whether the last step was replayed (`cuda_graph`), so that `timeline` is of an earlier one."""
        return self._now.replays

    def timeline(self) -> Timeline:
        """The last step as measured on all ranks; every rank must call it. With `cuda_graph` the last that
        was not replayed. Raises RunError before a step."""
        now = self._now
        if now.last is None:
            raise RunError("there is no measured step yet: call step(batch) first")
        marks = now.state.clock.read(now.last)
        marks.peak_bytes = now.peak_bytes + self.tensors.state_bytes()
        gathered = self.transport.all_gather((marks, self.transport.clock_offset_us()))
        return build_timeline(now.plan, [m for m, _ in gathered], [offset for _, offset in gathered])

    def observed(self) -> tuple[Observed, ...]:
        """What the model's code showed (`stretto.observe`) in the steps since this was last called, at most
        256, over all ranks; every rank must call it. No step waits for it: this call does."""
        return self._observed(forget=True)

    def _observed(self, forget: bool) -> tuple[Observed, ...]:
        return one_after_another(observed(one.state.watch, self.transport, forget) for one in self._plans)

    def report(self) -> Report:
        """Measured against predicted of the last step, and what `observed` would give; every rank must call
        it. `print` shows a table. What cannot be reported is replaced by the reason, so that a script's last
        line does not lose the rest."""
        seen, plan = self._observed(forget=False), self._now.plan
        try:
            return Report(plan, self.timeline(), seen)
        except LostRankError:
            raise
        except Exception as error:
            gathered = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            return Report(plan, None, seen, gathered)

"""How a step is distributed over ranks and overlapped; `stretto.Parallel` is the face of it in code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, InstanceOf, field_validator, model_validator

from stretto.config.stage_text import read_stages
from stretto.files.settings_file import NamedArguments, Settings
from stretto.ir.action import Schedule
from stretto.ir.limits import MOST_ACTIONS, MOST_MICROBATCHES, MOST_RANKS, MOST_STAGES
from stretto.ir.parameters import Zero
from stretto.ir.stage_maps import AUTO, is_own

Count = Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_STAGES)]
"""A number, or what the planner chooses."""

SENT = "what expert-parallel ranks send each other"
SHARED = "the work of tensor-parallel ranks"
IDLE = {
    "ep_plan": ("modules of experts", ("ep", "ampipe_degree")),
    **dict.fromkeys(("ep_buffer", "ep_overflow", "pipe_experts", "pipe_experts_multi_data"), (SENT, ("ep",))),
    "ampipe_capacity": ("chunks of the sequence", ("ampipe_degree",)),
    **dict.fromkeys(("sequence_parallel", "tp_plan"), (SHARED, ("tp",))),
    "zero": ("what ranks have copies of", ("dp", "cp")),
}
"""Keys -> what they are about, and the keys of which one is above 1 where they do anything."""


class ParallelSettings(Settings):
    """How the model and the batch are distributed over ranks."""

    pp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Pipeline ranks."""
    dp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Data-parallel copies, each of which takes an equal part of the global batch."""
    zero: Annotated[
        Zero, BeforeValidator(lambda given: repr(given) if isinstance(given, bool) else given)
    ] = 0
    """What data- and context-parallel ranks keep in parts, rows of each parameter, instead of copies: with 1
    the optimizer's state and the parameters that it changes, with 2 also gradients, with 3 also what the
    model computes with; "auto" is the fastest of them that fits a rank's memory."""
    dp_shard: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Neighbouring data-parallel ranks among which `zero` deals out parts; between such groups there are
    copies. It divides `dp`, and `ep` divides it; without it, all of `dp`."""
    owners: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Parameters of which one rank keeps all, and the others nothing: patterns of their names, in which * is
    any text ("*", "blocks.*.weight"). With `zero = 1`, instead of rows, for optimizers that look at full
    matrices (Muon, Adafactor); dealt out so that ranks have equally much (`docs/zero.md`)."""
    updates: bool = False
    """Whether the optimizer's updates are part of the step. Each bucket of gradients then goes with an op
    that updates its parameters (`Runner(plan, model, optimizer=...)`); else you call `optimizer.step()`
    (`docs/zero.md`)."""
    clip_norm: float | None = Field(default=None, ge=0)
    """The norm to which `updates` clip all gradients, for which they wait; 0 measures it alone."""
    ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Expert-parallel ranks, which share the experts of a layer; taken from the data-parallel ones, so `dp`
    is a multiple of it."""
    ep_plan: dict[str, str] | None = None
    """Which modules have experts, where the model has no plan of its own: a pattern of module names
    ("layers.*.mlp.experts", where * is one part of a name) and "experts"."""
    ep_buffer: float | None = Field(default=None, ge=1)
    """Rows that a rank can be sent by another, over the mean, where routing has no capacity of its own. None
    is room for all, which is `ep` times the mean; a run's table of loads says how much was needed."""
    ep_overflow: Literal["error", "drop"] = "error"
    """What becomes of rows beyond `ep_buffer`: the step fails and says what it needs, or they are dropped,
    as an evaluation does either way."""
    ampipe_degree: Count = 1
    """Chunks of the sequence in which blocks work from attention to MLP, so that what one chunk communicates
    runs under the compute of another (`docs/experts.md`); 1 does not cut, and "auto" takes of 1, 2 and 4 what
    is predicted to be the fastest."""
    ampipe_capacity: Literal["chunk", "whole"] = "chunk"
    """With a capacity, which tokens share an expert's slots: those of a chunk, as in MindSpeed, or all of the
    microbatch's, as without chunks; then experts wait for all chunks."""
    pipe_experts: bool = False
    """Whether each of a rank's experts gets its tokens by an all-to-all of its own, which runs under the
    products of the others; with a capacity only, as else it is not known where an expert's tokens begin."""
    pipe_experts_multi_data: int = Field(default=1, ge=1, le=MOST_STAGES)
    """Slices of the tokens that ranks send each other, each with all-to-alls of its own."""
    tp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel ranks, which share the matrices of every layer."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also share the sequence between matrices (norms, dropout, residuals)."""
    tp_plan: dict[str, str] | None = None
    """Which modules are sharded over tp, and how: a pattern of module names ("blocks.*.mlp.up", where * is
    one part of a name) and a style: "colwise", "packed_colwise:3", "rowwise", "vocabulary", "experts" or
    "replicated". Without it, the model's own plan."""
    cp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Context-parallel ranks, which share the sequence of every sample: each computes its own tokens, and
    attention of their queries to the keys of all. The sequence is a multiple of twice as many: each has an
    early block and a late one, so that causal masks leave all as much to do."""
    cp_kind: Literal["auto", "ring", "gathered", "ulysses"] = "auto"
    """How context-parallel ranks get the keys and values of others: by a "ring" of messages, which hides
    under attention; "gathered" at once, before it; or, with "ulysses", all tokens of fewer heads. "auto" is
    a ring where a step computes more than 1,000 flops for each byte of its message, else "gathered"."""
    microbatches: int = Field(default=1, ge=1, le=MOST_MICROBATCHES)
    """Slices of a copy's batch that go through the pipeline one by one."""
    schedule: Annotated[str, Field(min_length=1)] | InstanceOf[Schedule] = "eager-1f1b"
    """A family of schedules, the path of a .csv in PyTorch's format (in code also a Schedule), or "auto" for
    the fastest that planning finds with the stages that there are (`docs/schedules.md`)."""
    stages: int | None = Field(default=None, ge=1, le=MOST_STAGES)
    """Stages of the model in all; without it those of `split` or of a Schedule, or `pp` times
    `virtual_stages`. Ranks may have unequally many with schedule = "auto", or your own."""
    virtual_stages: Count | None = None
    """Stages of the model on each pipeline rank; without it, what the schedule needs: 1, or 2 for interleaved
    and V-shaped ones. "auto", with schedule = "auto": the step is captured with 1, 2 and 4 of them, as far as
    the model has layers for that, and the fastest plan is taken."""
    microbatch_group: int | None = Field(default=None, ge=1)
    """In interleaved schedules, microbatches that go through one of a rank's stages before its next begins;
    without it, as many as there are pipeline ranks, or a few more where they do not divide."""
    split: str | list[str] = "auto"
    """Where the model is cut: "auto"; the modules that begin a new stage, such as ["blocks.4"]; or a text of
    what each stage has, such as "embedding|layer*3|layer*3|loss" or Megatron's "Et*3|t*3|L"
    (`docs/schedules.md`)."""
    max_live: int | None = Field(default=None, ge=1)
    """The most microbatches whose activations a rank keeps at once; without it, the family's own limit."""
    overlap: Literal["off", "local", "window"] = "window"
    """What hides communication: "off" waits for each at once (the baseline), "local" orders the ops within an
    action, "window" also those of one microbatch's forward with another's backward, where that is faster."""
    split_ops: bool = False
    """Whether products and the collectives of their results are cut in parts where that is predicted to be
    faster. Parts may be rounded otherwise than the full product."""
    skip_passes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of passes over the captured graph to leave out (`stretto.passes`), to find what one does."""
    recompute: Literal["none", "selective", "full", "gathers"] | Annotated[int, Field(gt=0)] = "none"
    """What the backward computes again instead of keeping it: "none", "selective" (what is cheap for the
    memory that it saves), "full" (all but the inputs of the model's blocks), "gathers" (what sequence
    parallelism gathers), or the most bytes that a rank may keep, for which the planner chooses."""

    @property
    def world(self) -> int:
        """Ranks of a run."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages_asked(self) -> int | None:
        """Stages by `stages`, `split`, or a Schedule; None where these leave their number open."""
        return next((count for count, _ in self._stages_said()), None)

    def _stages_said(self) -> Iterator[tuple[int, str]]:
        """Each number of stages that the settings give, with how they do."""
        if self.stages is not None:
            yield self.stages, f"stages = {self.stages} makes {self.stages} stages"
        if isinstance(self.split, list):
            count = len(self.split) + 1
            yield count, f"split names {len(self.split)} modules and so makes {count} stages"
        elif self.split != "auto":
            count = len(read_stages(self.split).of)
            yield count, f"split = {self.split!r} has {count} stages"
        own = self.schedule
        if isinstance(own, Schedule):
            yield own.stages, f"the schedule {own.family!r} has {own.stages} stages"

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(axis, size) other than pp of the axes that are used, outermost first."""
        each = self.dp_shard or self.dp
        groups = self.dp // each if each < self.dp else self.dp // self.ep
        among = each // self.ep if each < self.dp else 1
        sizes = (("dp", groups), ("dp_shard", among), ("cp", self.cp), ("ep", self.ep), ("tp", self.tp))
        return tuple((axis, size) for axis, size in sizes if size > 1)

    @property
    def kept_axes(self) -> tuple[str, ...]:
        """The axes over which `zero` deals out parts, in the order in which gradients are scattered."""
        used = dict(self.axes)
        copies = "dp" if self.dp_shard in (None, self.dp) else "dp_shard"
        return tuple(axis for axis in ("cp", "ep", copies) if self.zero and axis in used)

    @field_validator("split")
    @classmethod
    def _is_read(cls, given: str | list[str]) -> str | list[str]:
        if isinstance(given, str) and given != "auto":
            read_stages(given)
        return given

    @model_validator(mode="after")
    def _axes_fit(self) -> ParallelSettings:
        each = self.virtual_stages if isinstance(self.virtual_stages, int) else 1
        stages = self.stages or self.pp * each
        for what, count, most in (
            ("pp times dp times cp times tp is the number of ranks", self.world, MOST_RANKS),
            ("stages times microbatches is what a schedule orders", stages * self.microbatches, MOST_ACTIONS),
        ):
            if count > most:
                raise ValueError(f"{what}: {count:,} are more than {most:,}; give less of one of them")
        if self.dp % self.ep:
            raise ValueError(
                f"ep = {self.ep} takes its ranks from the data-parallel ones, and dp = {self.dp} is no "
                f"multiple of it; give dp = {self.ep * -(-self.dp // self.ep)}, or another ep"
            )
        each = self.dp_shard or self.dp
        if self.dp_shard is not None and self.zero == 0:
            raise ValueError(
                f'dp_shard = {each} is about the parts that zero makes; give zero = 1, 2, 3 or "auto", or '
                "drop it"
            )
        if self.owners and self.zero != 1:
            raise ValueError(
                f"owners = {list(self.owners)} is about what zero = 1 deals out, and zero = {self.zero!r}: "
                "what one rank keeps in full is gathered, and its gradients are reduced, once a step; give "
                "zero = 1, or drop it"
            )
        if self.clip_norm is not None and not self.updates:
            raise ValueError(
                f"clip_norm = {self.clip_norm} is about updates that are part of the step; give updates = "
                "True, or drop it, and clip with stretto.train.clip.GradientClip"
            )
        if self.dp % each or each % self.ep:
            fitting = [
                n for n in range(1, self.dp + 1) if self.dp % n == 0 == n % self.ep and n * self.cp > 1
            ]
            raise ValueError(
                f"dp_shard = {each} must divide dp = {self.dp} and be a multiple of ep = {self.ep}; give one "
                f"of {', '.join(map(str, fitting))}, or drop it"
            )
        if each == self.cp == 1 < self.dp:
            raise ValueError(
                "dp_shard = 1 leaves no ranks for zero to deal out parts to; give 2 or more, or drop it"
            )
        for key, (what, wanted) in IDLE.items():
            given = getattr(self, key)
            idle = all(getattr(self, one) == 1 for one in wanted)
            if idle and given != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} = {given!r} is about {what}; give {wanted[0]} = 2 or more, or drop it"
                )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> ParallelSettings:
        said = [*self._stages_said()]
        if self.virtual_stages == "auto":
            if self.schedule != AUTO:
                raise ValueError(
                    f'virtual_stages = "auto" is for the search of schedule = "auto", not for '
                    f"{self.schedule!r}: give that schedule, or a number of stages"
                )
            if said:
                raise ValueError(f'{said[0][1]}, and virtual_stages = "auto" leaves that open: drop one')
        if not said:
            return self
        stages, made = said[0]
        for other, how in said[1:]:
            if other != stages:
                raise ValueError(f"{made}, but {how}: give equally many, or leave one of them out")
        twice = sorted({name for name in self.split if self.split.count(name) > 1})
        if isinstance(self.split, list) and twice:
            raise ValueError(f"split names {', '.join(twice)} more than once; name each module once")
        own = self.schedule
        if isinstance(own, Schedule):
            for key, has in (("pp", own.ranks), ("microbatches", own.microbatches)):
                if getattr(self, key) != has:
                    raise ValueError(
                        f"the schedule {own.family!r} is for {key} = {has}, not {getattr(self, key)}: give "
                        f"{key} = {has}, or another schedule"
                    )
            return self
        if stages % self.pp and own != AUTO and not is_own(own):
            fitting = next(pp for pp in range(min(self.pp, stages), 0, -1) if stages % pp == 0)
            raise ValueError(
                f"{made}, which must be a multiple of pp = {self.pp}: make them "
                f"{-(-stages // self.pp) * self.pp}, or give pp = {fitting}, or a schedule of your own (.csv)"
            )
        if isinstance(self.virtual_stages, int) and stages != self.pp * self.virtual_stages:
            raise ValueError(
                f"{made}, but pp = {self.pp} and virtual_stages = {self.virtual_stages} make "
                f"{self.pp * self.virtual_stages}; give virtual_stages = {stages // self.pp}, or drop it"
            )
        return self


class Parallel(NamedArguments, ParallelSettings):
    """How the model and the batch are distributed over ranks: `stretto.Parallel(pp=2, microbatches=8)`.

    Each field in full: docs/settings.md, `[parallel]`. Raises UsageError that names the argument and what is
    allowed.
    """

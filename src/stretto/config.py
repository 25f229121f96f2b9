"""The settings of a training run: one typed tree, read from a TOML file and `--set key=value`.

Each field's docstring is its documentation. The tree knows which values are possible and which belong
together; what a value does is for its owner, and this room imports none of them. How a file is read,
and how faults are worded, is in `stretto.files.settings_file`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from stretto.errors import UsageError
from stretto.files.settings_file import read_settings, refusal


class Settings(BaseModel):
    """What all parts of the tree have in common: no unknown key, no change, no guessing of types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DecoderSettings(Settings):
    """What Stretto's own transformers have in common."""

    vocab_size: int | None = Field(default=None, ge=0)
    """Rows of the embedding; without it, or with 0, as many as the tokenizer has tokens."""
    layers: int = Field(default=8, ge=1)
    """Transformer blocks."""
    hidden: int = Field(default=256, ge=1)
    """Width of the residual stream."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; `hidden` is a multiple of it."""
    context: int = Field(default=256, ge=1)
    """The longest sequence in tokens; `data.sequence_length` is not above it."""
    mlp_ratio: float = Field(default=4.0, gt=0)
    """Width of the MLP over `hidden`; the width is 1 or more."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an activation while training."""
    tie_embeddings: bool = False
    """Whether the output layer uses the embedding's weight."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How a position is encoded: by rotating queries and keys, or by a learned vector."""

    @model_validator(mode="after")
    def _heads_fit(self) -> DecoderSettings:
        if self.hidden % self.heads:
            raise ValueError(f"hidden = {self.hidden} must be a multiple of heads = {self.heads}")
        if self.positions == "rotary" and (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden / heads = {self.hidden // self.heads} must be even for positions = 'rotary'; "
                "change heads, or use positions = 'learned'"
            )
        return self

    @model_validator(mode="after")
    def _mlp_fits(self) -> DecoderSettings:
        if round(self.hidden * self.mlp_ratio) < 1:
            raise ValueError(
                f"mlp_ratio = {self.mlp_ratio} of hidden = {self.hidden} makes an MLP of width 0; "
                f"give {1 / self.hidden:.3g} or more"
            )
        return self


class GPTSettings(DecoderSettings):
    """Stretto's own GPT (`stretto.models.gpt`)."""

    kind: Literal["gpt"] = "gpt"
    """Which kind of model this is."""


class MoESettings(DecoderSettings):
    """A GPT whose blocks have experts in place of one MLP (`stretto.models.moe`)."""

    kind: Literal["moe"]
    """Which kind of model this is."""
    experts: int = Field(default=8, ge=2)
    """Experts of a block."""
    top_k: int = Field(default=2, ge=1)
    """Experts that a token goes to."""
    expert_ratio: float = Field(default=4.0, gt=0)
    """Width of an expert over `hidden`."""
    capacity_factor: float = Field(default=1.25, ge=0)
    """Tokens that an expert takes of a microbatch, over its even share; those beyond it are dropped. 0 is
    dropless: every token is served."""
    shared_experts: int = Field(default=0, ge=0)
    """Experts that every token goes to, beside those that its router chooses."""
    dense_every: int = Field(default=0, ge=0)
    """One block in so many has a plain MLP, the first block first; 0 for none."""
    aux_weight: float = Field(default=0.01, ge=0)
    """Weight of the loss that balances the experts' loads."""
    z_weight: float = Field(default=0.001, ge=0)
    """Weight of the loss that keeps routers' scores small."""

    @model_validator(mode="after")
    def _experts_fit(self) -> MoESettings:
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} must not be above experts = {self.experts}")
        if round(self.hidden * self.expert_ratio) < 1:
            raise ValueError(
                f"expert_ratio = {self.expert_ratio} of hidden = {self.hidden} makes experts of width 0; "
                f"give {1 / self.hidden:.3g} or more"
            )
        return self


class HuggingFaceSettings(Settings):
    """A causal language model of `transformers`, with fresh weights."""

    kind: Literal["huggingface"]
    """Which kind of model this is."""
    architecture: str = Field(min_length=1)
    """The model's class in `transformers`, such as "LlamaForCausalLM"."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's configuration class; `vocab_size` is the tokenizer's when it is absent."""


class DataSettings(Settings):
    """Which text to train on, and how it becomes tokens."""

    paths: list[str] = Field(default_factory=list)
    """Files and folders (UTF-8 text, .jsonl, .parquet), relative to the working directory; none means the
    Python standard library's own source files."""
    sequence_length: int = Field(default=256, ge=1)
    """Tokens that the model sees at once."""
    vocab_size: int = Field(default=4096, ge=257, le=2**31 - 1)
    """Tokens of the byte-pair encoding: 256 bytes, the end of a text, and the merges learned."""
    held_out_fraction: float = Field(default=0.02, gt=0, le=0.5)
    """Share of the text that is never trained on."""
    text_field: str = Field(default="text", min_length=1)
    """The field (.jsonl) or column (.parquet) that holds the text."""
    cache_dir: str | None = Field(default=None, min_length=1)
    """Where tokens are kept between runs; by default `$XDG_CACHE_HOME/stretto` or `~/.cache/stretto`."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the order in which sequences are visited."""


def _with_kind(given: Any) -> Any:
    """A model without a kind is of the default one."""
    return {"kind": GPTSettings.model_fields["kind"].default, **given} if isinstance(given, dict) else given


Model = Annotated[
    GPTSettings | MoESettings | HuggingFaceSettings, Field(discriminator="kind"), BeforeValidator(_with_kind)
]

RECOMPUTE = ("none", "selective", "full", "gathers")
"""Words for what the backward computes again; a number is a limit of memory."""


def _recompute(given: Any) -> str | int:
    """A word, or a limit: one message for both."""
    if given in RECOMPUTE and isinstance(given, str):
        return str(given)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    words = ", ".join(repr(word) for word in RECOMPUTE)
    raise ValueError(f"{given!r} is neither {words} nor a number of bytes that a rank may hold")


def _degree(given: Any) -> int | Literal["auto"]:
    if given == "auto":
        return "auto"
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    raise ValueError(f"{given!r} is neither 'auto' nor a number of chunks from 1 on")


class ParallelSettings(Settings):
    """How the model and the batch are spread over ranks."""

    pp: int = Field(default=1, ge=1)
    """Pipeline ranks."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel copies, each of which takes an equal part of the global batch."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel ranks, which share the experts of a layer; taken from the data-parallel ones, so `dp`
    is a multiple of it."""
    ep_buffer: float = Field(default=2.0, ge=1)
    """Rows that a rank can be sent by another, over the mean, where routing has no capacity of its own."""
    ampipe_degree: Annotated[int | Literal["auto"], PlainValidator(_degree)] = 1
    """Chunks of the sequence in which blocks work from attention to MLP, so that what one chunk communicates
    runs under the compute of another (`docs/experts.md`); 1 does not cut, and "auto" takes of 1, 2 and 4 what
    is predicted to be the fastest."""
    ampipe_capacity: Literal["chunk", "whole"] = "chunk"
    """With a capacity, which tokens share an expert's slots: those of a chunk, as in MindSpeed, or all of the
    microbatch's, as without chunks; then experts wait for all chunks."""
    pipe_experts: bool = False
    """Whether each of a rank's experts gets its tokens by an all-to-all of its own, which runs under the
    products of the others; with a capacity only, as else it is not known where an expert's tokens begin."""
    pipe_experts_multi_data: int = Field(default=1, ge=1)
    """Slices of the tokens that ranks send each other, each with all-to-alls of its own."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks, which share the matrices of every layer."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also share the sequence between matrices (norms, dropout, residuals)."""
    tp_plan: dict[str, str] | None = None
    """Which modules are spread over tp, and how: a pattern of module names ("blocks.*.mlp.up", where * is one
    part of a name) and a style: "colwise", "rowwise", "vocabulary", "sequence", "colwise_gather_output",
    "rowwise_split_input", "packed_colwise:3" or "replicated". Without it, the model's own plan."""
    microbatches: int = Field(default=1, ge=1)
    """Slices of a data-parallel copy's batch that go through the pipeline one by one."""
    schedule: str = Field(default="eager-1f1b", min_length=1)
    """A family of schedules, or the path of a .csv in PyTorch's format."""
    split: Literal["auto"] | list[str] = "auto"
    """Where the model is cut: "auto", or the modules that begin a new stage, such as ["blocks.4"]."""
    max_live: int | None = Field(default=None, ge=1)
    """The most microbatches whose activations a rank keeps at once; without it, the family's own limit."""
    overlap: Literal["off", "local", "window"] = "window"
    """What hides communication: "off" waits for each at once (the baseline), "local" orders the ops within an
    action, "window" also those of one microbatch's forward with another's backward, where that is faster."""
    split_ops: bool = False
    """Whether products and the collectives of their results are cut in parts where that is predicted to be
    faster. Parts may be rounded otherwise than the whole."""
    skip_passes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of passes over the captured graph to leave out (`stretto.passes`), to find what one does."""
    recompute: Annotated[str | int, PlainValidator(_recompute)] = "none"
    """What the backward computes again instead of keeping it: "none", "selective" (what is cheap for the
    memory that it saves), "full" (all but the inputs of the model's blocks), "gathers" (what sequence
    parallelism gathers), or the most bytes that a rank may hold, for which the planner chooses."""

    @property
    def world(self) -> int:
        """Ranks of a run."""
        return self.pp * self.dp * self.tp

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(axis, size) beside pp of the axes that are used, outermost first."""
        sizes = (("dp", self.dp // self.ep), ("ep", self.ep), ("tp", self.tp))
        return tuple((axis, size) for axis, size in sizes if size > 1)

    @model_validator(mode="after")
    def _axes_fit(self) -> ParallelSettings:
        if self.dp % self.ep:
            raise ValueError(
                f"ep = {self.ep} takes its ranks from the data-parallel ones, and dp = {self.dp} is no "
                f"multiple of it; give dp = {self.ep * -(-self.dp // self.ep)}, or another ep"
            )
        if self.ep == 1 and (self.pipe_experts or self.pipe_experts_multi_data > 1):
            what = "pipe_experts" if self.pipe_experts else "pipe_experts_multi_data"
            raise ValueError(f"{what} cuts what expert-parallel ranks send; give ep = 2 or more, or drop it")
        if self.tp == 1 and (self.sequence_parallel or self.tp_plan is not None):
            what = "sequence_parallel" if self.sequence_parallel else "tp_plan"
            raise ValueError(
                f"{what} shares the work of tensor-parallel ranks; give tp = 2 or more, or drop it"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> ParallelSettings:
        if self.split == "auto":
            return self
        stages = len(self.split) + 1
        if len(set(self.split)) != len(self.split):
            twice = sorted({name for name in self.split if self.split.count(name) > 1})
            raise ValueError(f"split names {', '.join(twice)} more than once; name each module once")
        if stages % self.pp:
            raise ValueError(
                f"split names {len(self.split)} modules and so makes {stages} stages, "
                f"which must be a multiple of pp = {self.pp}"
            )
        return self


TO_COME = {
    "cp": "context parallelism",
}
"""Axes that users of other systems will ask for, and that this version does not have."""


class Parallel(ParallelSettings):
    """`ParallelSettings` as code writes them: `stretto.Parallel(pp=2, microbatches=8)`.

    Raises UsageError that names the argument and what is allowed.
    """

    def __init__(self, **given: Any) -> None:
        for axis in TO_COME.keys() & given.keys():
            raise UsageError(
                f"Parallel({axis}=...): {TO_COME[axis]} is to come; today a job is spread over pp, dp, ep "
                "and tp"
            )
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise refusal("Parallel", list(ParallelSettings.model_fields), error) from None


Decay = Annotated[float, Field(ge=0, lt=1)]
# TOML has no tuples: its list becomes one here, which strict reading would refuse.
Betas = Annotated[tuple[Decay, Decay], Field(strict=False)]


class OptimizerSettings(Settings):
    """AdamW (Loshchilov and Hutter, 2019)."""

    lr: float = Field(default=1e-3, gt=0)
    """The highest learning rate, reached after the warm-up."""
    betas: Betas = (0.9, 0.95)
    """Decay of the averages of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the squared average."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; vectors are not decayed."""
    grad_clip_norm: float = Field(default=1.0, ge=0)
    """The gradient's global norm is clipped to this; 0 does not clip."""


class LRScheduleSettings(Settings):
    """How the learning rate changes over the steps."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """The way from the highest to the lowest rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from 0."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The rate at the last step over `optimizer.lr`; "constant" does not use it."""


class TrainingSettings(Settings):
    """How long to train, and what to look at meanwhile."""

    steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    global_batch: int = Field(default=16, ge=1)
    """Sequences in a step, over all microbatches."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the initial weights and dropout."""
    eval_every: int = Field(default=100, ge=0)
    """Steps between two measurements of the held-out loss; 0 measures after the last step only."""
    eval_batches: int = Field(default=4, ge=1)
    """Global batches of held-out text in a measurement."""
    sample_tokens: int = Field(default=64, ge=0)
    """Tokens of text to write with the trained model; 0 writes none."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two lines of the log."""
    threads_per_rank: int | None = Field(default=None, ge=1)
    """Processor threads of each rank; without it OMP_NUM_THREADS, without that the machine's cores over its
    ranks."""


class CheckpointSettings(Settings):
    """When to save the state of a run, and what to start from."""

    dir: str | None = Field(default=None, min_length=1)
    """Where checkpoints are; by default `checkpoints` in the run's folder."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between two checkpoints; 0 saves after the last step only."""
    keep: int = Field(default=2, ge=1)
    """How many checkpoints stay; older ones are removed."""
    resume: str = Field(default="auto", min_length=1)
    """"auto": go on from the newest whole checkpoint in `dir`, if any; "never": start anew; else the path of
    the checkpoint to go on from."""


class OutputSettings(Settings):
    """What a run leaves behind."""

    run_dir: str | None = Field(default=None, min_length=1)
    """The run's folder; by default `runs/<name>`."""
    tensorboard: bool = False
    """Whether to write TensorBoard events too (needs `pip install 'stretto[tensorboard]'`)."""
    trace_steps: int = Field(default=3, ge=0)
    """Of how many of the last steps a timeline is gathered from all ranks; the one of median length is saved,
    and compared with the prediction. 0 gathers none."""


class TrainSettings(Settings):
    """All settings of a run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's name; in a file that gives none, the file's own."""
    model: Model = GPTSettings()
    """What is trained."""
    data: DataSettings = DataSettings()
    """What it is trained on."""
    parallel: ParallelSettings = ParallelSettings()
    """How it is spread over ranks."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """How weights follow gradients."""
    lr_schedule: LRScheduleSettings = LRScheduleSettings()
    """How the learning rate changes."""
    precision: Literal["float32", "bf16"] = "float32"
    """"bf16" computes in bfloat16; weights and the optimizer's state stay in float32."""
    compile: Literal["inductor"] | None = None
    """"inductor" compiles stretches of compute between communications; the first step waits for it."""
    training: TrainingSettings = TrainingSettings()
    """How long to train."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When to save."""
    output: OutputSettings = OutputSettings()
    """What to leave behind."""

    @property
    def run_dir(self) -> Path:
        """The run's folder: `output.run_dir`, or `runs/<name>`."""
        return Path(self.output.run_dir) if self.output.run_dir is not None else Path("runs") / self.name

    @property
    def checkpoint_dir(self) -> Path:
        """The checkpoints' folder: `checkpoint.dir`, or `checkpoints` in the run's folder."""
        return Path(self.checkpoint.dir) if self.checkpoint.dir is not None else self.run_dir / "checkpoints"

    @model_validator(mode="after")
    def _parts_fit(self) -> TrainSettings:
        if faults := _faults_between_parts(self):
            raise ValueError("\n".join(faults))
        return self


def _faults_of_experts(settings: TrainSettings) -> list[tuple[bool, str]]:
    model, parallel, length = settings.model, settings.parallel, settings.data.sequence_length
    experts = model.experts if isinstance(model, MoESettings) else parallel.ep
    fits = [n for n in range(1, experts + 1) if experts % n == 0]
    return [
        (
            parallel.ep > 1 and isinstance(model, GPTSettings),
            f"parallel.ep = {parallel.ep} shares experts, which a model of kind 'gpt' does not have: give "
            "model.kind = 'moe', or ep = 1",
        ),
        (
            experts % parallel.ep > 0,
            f"parallel.ep = {parallel.ep} must divide model.experts = {experts}: give one of {fits}",
        ),
        (
            parallel.ampipe_degree != "auto"
            and parallel.ampipe_degree > 1
            and length < 2 * parallel.ampipe_degree,
            f"parallel.ampipe_degree = {parallel.ampipe_degree} cuts data.sequence_length = {length} into "
            f"chunks of less than two tokens: give {max(length // 2, 1)} or less",
        ),
    ]


def _faults_between_parts(settings: TrainSettings) -> list[str]:
    """What does not fit between two parts of the tree, a line each."""
    model, parallel, training = settings.model, settings.parallel, settings.training
    length = settings.data.sequence_length
    if isinstance(model, DecoderSettings):
        longest, what, layers, heads = model.context, "model.context", model.layers, model.heads
    else:
        given, what = model.config.get("max_position_embeddings"), "model.config.max_position_embeddings"
        longest, layers, heads = given if isinstance(given, int) else length, parallel.pp, parallel.tp
    pieces, by = parallel.microbatches * parallel.dp, ""
    if parallel.dp > 1:
        by = f" times parallel.dp = {parallel.dp}"
    warmup = settings.lr_schedule.warmup_steps
    checked = (
        (length > longest, f"data.sequence_length = {length} must not be above {what} = {longest}"),
        (heads % parallel.tp, f"model.heads = {heads} must be a multiple of parallel.tp = {parallel.tp}"),
        (
            parallel.pp > layers,
            f"parallel.pp = {parallel.pp} must not be above model.layers = {layers}: "
            "every rank needs a block",
        ),
        (
            training.global_batch % pieces,
            f"training.global_batch = {training.global_batch} must be a multiple of "
            f"parallel.microbatches = {parallel.microbatches}{by}",
        ),
        *_faults_of_experts(settings),
        (
            parallel.sequence_parallel and length % parallel.tp,
            f"data.sequence_length = {length} must be a multiple of parallel.tp = {parallel.tp}: "
            "sequence_parallel gives each rank an equal part",
        ),
        (
            warmup > training.steps,
            f"lr_schedule.warmup_steps = {warmup} must not be above training.steps = {training.steps}",
        ),
    )
    return [fault for wrong, fault in checked if wrong]


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> TrainSettings:
    """Read a run's settings from a TOML file; `overrides` are `optimizer.lr=1e-3` and change what it says.

    An override's value is TOML, or else plain text; an empty one (`parallel.max_live=`) puts the default
    back. Raises UsageError that lists every fault: the file (or the override), the key, the value, what is
    allowed, and for an unknown key the nearest known one.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).lstrip("._-")
    return read_settings(TrainSettings, path, overrides, defaults={"name": name or "run"})

"""The settings of a training run: one typed tree, read from a TOML file and `--set key=value`.

Each field's docstring is its documentation. The tree knows which values are possible and which belong
together; what a value does is for its owner, and this room imports none of them. How a file is read,
and how faults are worded, is in `stretto.files.settings_file`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stretto.config.data import DataSettings as DataSettings
from stretto.config.data import faults_of_data
from stretto.config.experts import faults_of_experts
from stretto.config.model import DecoderSettings as DecoderSettings
from stretto.config.model import GPTSettings as GPTSettings
from stretto.config.model import HuggingFaceSettings as HuggingFaceSettings
from stretto.config.model import Model as Model
from stretto.config.model import MoESettings as MoESettings
from stretto.config.parallel import Parallel as Parallel
from stretto.config.parallel import ParallelSettings as ParallelSettings
from stretto.config.pretrained import complete
from stretto.config.stage_text import evenly, read_stages
from stretto.files.say import Say, silent
from stretto.files.settings_file import Settings, read_settings
from stretto.ir.stage_maps import unknown_schedule

Decay = Annotated[float, Field(ge=0, lt=1)]
# TOML has no tuples: its list becomes one here, which strict reading would refuse.
Betas = Annotated[tuple[Decay, Decay], Field(strict=False)]


class OptimizerSettings(Settings):
    """How weights follow gradients: AdamW (Loshchilov and Hutter, 2019), or another one of PyTorch's."""

    name: str = Field(default="AdamW", min_length=1)
    """The class of `torch.optim`. One that looks at full matrices (Adafactor) needs ranks that have them, or
    `parallel.owners`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class that are no settings of their own: `momentum` and `nesterov` of SGD, for
    instance."""
    lr: float = Field(default=1e-3, gt=0)
    """The highest learning rate, reached after the warm-up."""
    betas: Betas = (0.9, 0.95)
    """Decay of the averages of the gradient and of its square, where the optimizer has them. This default,
    and those of `eps` and `weight_decay`, are AdamW's: another class has PyTorch's where none is given."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the squared average, where the optimizer has one."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices, which AdamW decouples from the gradient; vectors are not decayed."""
    grad_clip_norm: float = Field(default=1.0, ge=0)
    """The gradient's global norm is clipped to this; 0 does not clip."""


class LRScheduleSettings(Settings):
    """How the learning rate changes over the steps."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The way from the highest to the lowest rate; "wsd" (warm-up, stable, decay) stays at the highest, and
    goes down over the last `decay_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from 0; a shorter run ends on the way."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The rate at the last step over `optimizer.lr`; "constant" does not use it."""
    decay_steps: int = Field(default=0, ge=0)
    """Of "wsd": the steps at the end over which the rate falls linearly, at most those after the warm-up."""


class TrainingSettings(Settings):
    """How long to train, and what to look at meanwhile."""

    steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    global_batch: int = Field(default=16, ge=1, le=2**31 - 1)
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What ranks compute on: processors, or accelerators, one a rank; "auto" takes accelerators where this
    machine has as many as it has ranks."""
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
    asynchronous: bool = True
    """Whether one with steps behind it is written while these are taken, from a copy in the processor's
    memory, which takes as many bytes as the rank writes; false writes it between two steps."""
    resume: str = Field(default="auto", min_length=1)
    """"auto": go on from the newest complete checkpoint in `dir`, if any; "never": start again; else the path
    of the checkpoint to go on from."""


class OutputSettings(Settings):
    """What a run leaves behind."""

    run_dir: str | None = Field(default=None, min_length=1)
    """The run's folder; by default `runs/<name>`."""
    tensorboard: bool = False
    """Whether to write TensorBoard events too (needs `pip install 'stretto[tensorboard]'`)."""
    callbacks: list[str] = Field(default_factory=list)
    """Classes of your own that are called as the run goes on, on rank 0: `FILE.py:CLASS`, relative to the
    working directory ([which methods](training.md#callbacks)). The files are programs, and are run."""
    trace_steps: int = Field(default=3, ge=0)
    """Of how many of the last steps a timeline is gathered from all ranks; the one of median length is saved,
    and compared with the prediction. 0 gathers none."""


class TaskSettings(Settings):
    """A task of your own: a file has its data, model and loss, and `[model]` and `[data]` are absent."""

    file: str = Field(min_length=1)
    """A file of Python with a function `task(config, seed)` that returns a `stretto.train.task.Task`;
    relative to the working directory."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What the function is given as `config`."""


class PlanningSettings(Settings):
    """How the plan of a step is searched for."""

    order: str = Field(default="improve", min_length=1)
    """The policy that orders ops in windows (`docs/overlap.md`): "improve" searches, "list" lists them in a
    moment (steps are 2 to 13 % longer), "captured" leaves them as they are; or one
    that a task registers."""
    search_s: float | None = Field(default=None, gt=0)
    """About how many seconds of a processor core the longest search takes; without it, what a shorter step
    saves over `training.steps`. It is counted in orders walked, so that equal settings give equal plans."""
    reuse: Literal["auto", "renew", "off"] = "auto"
    """Costs and plans of earlier runs on this machine, which are kept in `$XDG_CACHE_HOME/stretto` or
    `~/.cache/stretto`: "auto" takes those that fit this job and machine, "renew" measures and plans again and
    keeps that, "off" neither looks nor keeps. The environment's STRETTO_REUSE comes before it; its "auto"
    only before "off"."""


class TrainSettings(Settings):
    """All settings of a run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's name; in a file that gives none, the file's own."""
    model: Model = GPTSettings()
    """What is trained."""
    data: DataSettings = DataSettings()
    """What it is trained on."""
    task: TaskSettings | None = None
    """A task of your own, in the place of `model` and `data`."""
    parallel: ParallelSettings = ParallelSettings()
    """How it is distributed over ranks."""
    planning: PlanningSettings = PlanningSettings()
    """How the plan of a step is searched for."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """How weights follow gradients."""
    lr_schedule: LRScheduleSettings = LRScheduleSettings()
    """How the learning rate changes."""
    precision: Literal["float32", "bf16"] = "float32"
    """"bf16" computes in bfloat16; weights and the optimizer's state stay in float32."""
    compile: Literal["inductor"] | None = None
    """"inductor" compiles stretches of compute between communications; the first step waits for it."""
    cuda_graph: bool = False
    """Whether the step is recorded once and then replayed, so that the host need not queue it: on
    accelerators, for models without dropout."""
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

    @property
    def layout(self) -> ParallelSettings:
        """`parallel`, with what its updates take from `optimizer`."""
        clipped = {"clip_norm": self.optimizer.grad_clip_norm} if self.parallel.updates else {}
        return self.parallel.model_copy(update=clipped)

    @model_validator(mode="after")
    def _parts_fit(self) -> TrainSettings:
        if faults := _faults_between_parts(self):
            raise ValueError("\n".join(faults))
        return self


def _faults_between_parts(settings: TrainSettings) -> list[str]:
    """What does not fit between two parts of the tree, a line each."""
    model, parallel, training, task = settings.model, settings.parallel, settings.training, settings.task
    length, split = settings.data.sequence_length, parallel.split
    buckets = settings.data.bucket_lengths
    each = parallel.virtual_stages if isinstance(parallel.virtual_stages, int) else 1
    stages, made = parallel.stages or parallel.pp * each, f"parallel.pp = {parallel.pp}"
    if parallel.stages is not None:
        made = f"parallel.stages = {stages}"
    elif each > 1:
        made += f" times parallel.virtual_stages = {each}"
    # What of a model of others fits its layout, its capture says.
    longest, what, layers, heads = length, "", stages, parallel.tp
    faults: list[str] = []
    if task is None and isinstance(model, DecoderSettings):
        longest, what, layers, heads = model.context, "model.context", model.layers, model.heads
        if isinstance(split, str) and split != "auto" and (written := read_stages(split)).layers != layers:
            faults.append(
                f"parallel.split = {split!r} has {written.layers} layers, but model.layers = {layers}: write "
                f"{evenly(layers, len(written.of)).text!r}"
            )
    elif isinstance(model, HuggingFaceSettings):
        given, what = model.config.get("max_position_embeddings"), "model.config.max_position_embeddings"
        longest = given if isinstance(given, int) else length
    pieces, by = parallel.microbatches * parallel.dp, ""
    if parallel.dp > 1:
        by = f" times parallel.dp = {parallel.dp}"
    checked = (
        (
            parallel.clip_norm is not None,
            f"parallel.clip_norm = {parallel.clip_norm} is optimizer.grad_clip_norm in the settings of a "
            "run: give that",
        ),
        (
            buckets != sorted({*buckets}) or any(one > length for one in buckets),
            f"data.bucket_lengths = {buckets} must ascend, up to data.sequence_length = {length} at most",
        ),
        (
            bool(buckets) and settings.data.document_masks,
            "data.document_masks keeps documents of one row apart, and with data.bucket_lengths each has a "
            "row of its own: take one out",
        ),
        (
            (settings.lr_schedule.kind == "wsd") != (settings.lr_schedule.decay_steps > 0),
            f"lr_schedule.decay_steps = {settings.lr_schedule.decay_steps} belongs to lr_schedule.kind = "
            f'"wsd", which needs it, and the kind is {settings.lr_schedule.kind!r}',
        ),
        (length > longest, f"data.sequence_length = {length} must not be above {what} = {longest}"),
        (heads % parallel.tp, f"model.heads = {heads} must be a multiple of parallel.tp = {parallel.tp}"),
        (
            split == "auto" and max(stages, parallel.pp) > layers,
            f"{made} must not be above model.layers = {layers}: every rank and every stage needs a block",
        ),
        (
            training.global_batch % pieces,
            f"training.global_batch = {training.global_batch} must be a multiple of "
            f"parallel.microbatches = {parallel.microbatches}{by}: give "
            f"{-(-training.global_batch // pieces) * pieces}",
        ),
    )
    faults += [fault for wrong, fault in checked if wrong]
    faults += faults_of_data(settings.data, model.pretrained)
    for key, one in (("sequence_length", length), *(("bucket_lengths", bucket) for bucket in buckets)):
        if parallel.cp > 1 and one % (2 * parallel.cp):
            faults.append(
                f"data.{key} = {one} must be a multiple of twice parallel.cp = {parallel.cp}: each rank has "
                "two equal blocks"
            )
        if parallel.sequence_parallel and one // parallel.cp % parallel.tp:
            faults.append(
                f"data.{key} = {one} must be a multiple of parallel.tp = {parallel.tp}: sequence_parallel "
                "gives each rank an equal part"
            )
    if task is not None:  # its file may register families of its own, and is read later
        of_text = (("model", model != GPTSettings()), ("data", settings.data != DataSettings()))
        return faults + [
            f"{key} is of text, and task.file = {task.file!r} has its own: take out [{key}]"
            for key, wrong in of_text
            if wrong
        ]
    if unknown := unknown_schedule(parallel.schedule):
        faults.append(f"parallel.schedule = {parallel.schedule!r}: {unknown}")
    return [*faults, *faults_of_experts(model, parallel, length, training.global_batch // pieces)]


def load_settings(path: str | Path, overrides: Sequence[str] = (), begin: Say = silent) -> TrainSettings:
    """Read a run's settings from a TOML file; `overrides` are `optimizer.lr=1e-3` and change what it says.

    An override's value is TOML, or else plain text; an empty one (`parallel.max_live=`) puts the default
    back. Raises UsageError that lists every fault: the file (or the override), the key, the value, what is
    allowed, and for an unknown key the nearest known one. A model that is `pretrained` gets its shape from
    there; `begin` receives a line before that takes long.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).lstrip("._-")
    return read_settings(
        TrainSettings, path, overrides, {"name": name or "run"}, partial(complete, begin=begin)
    )

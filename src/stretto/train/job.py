"""What settings train: the job to plan, its layout over ranks, and what of earlier runs it may reuse.

Models are built on "meta" or without values, but for `move`, which takes a rank's part to its device. Reads
no text. What only planning needs is loaded where it is used: a launcher does without.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from stretto.config import DecoderSettings, HuggingFaceSettings, PlanningSettings, TrainSettings
from stretto.errors import UsageError
from stretto.files.kept import Kept, cache_dir
from stretto.files.say import Say, silent
from stretto.ir.plan import Plan
from stretto.models.build import build_model, counted_loss_function, hollow, shapes_alone
from stretto.models.weight_files import weights_folder, weights_of
from stretto.parallelize.layout import RankLayout, layout_of
from stretto.train.checkpoint_files import latest_in
from stretto.train.encode import count
from stretto.train.rows import Rows, example_of
from stretto.train.task import Task, check_files, own_task
from stretto.train.text import given_tokenizer

if TYPE_CHECKING:
    from stretto.capturing.captures import Captures
    from stretto.price.cluster import Description

REUSE = "STRETTO_REUSE"
"""Environment variable: comes before the setting `planning.reuse`; "auto" only before "off"."""


def trained(settings: TrainSettings) -> Task:
    """What a run of these settings trains, as far as planning asks: no text is read, and batches of text have
    no values. Raises UsageError for a task that cannot be made."""
    check_files(settings)
    if settings.task is not None:
        return own_task(settings.task, settings.training.seed)
    example = example_of(settings.data)

    def batch(_: int, rows: int) -> Rows:
        return example(rows)

    return Task(
        model=partial(build_model, settings.model, likely_vocab_size(settings), settings.training.seed),
        loss=counted_loss_function(settings.model),
        train=batch,
        held_out=batch,
        digest="",
        unit="tokens",
        size=settings.data.sequence_length,
    )


def device_of(description: Description | None) -> str | None:
    """The kind of device that a step is captured for; None for the model's own.

    The catalogue's devices are accelerators: their kernels are captured, with none of them at hand. So are
    those that a calibration was measured on.
    """
    from stretto.price.calibration import Calibration
    from stretto.price.cluster_file import Hardware

    if isinstance(description, Calibration):
        return description.machine.kind
    return "cuda" if isinstance(description, Hardware) else None


def captures_of(settings: TrainSettings, description: Description | None) -> Captures:
    """The captures of what settings train, for a cluster (None for this machine)."""
    from stretto.capturing import DTYPES
    from stretto.capturing.captures import Captures

    of = trained(settings)
    with torch.device("meta"):
        model = of.model()
    batch, dtype = of.first_batch(settings.training.global_batch), DTYPES[settings.precision]
    return Captures(model, batch, of.loss, dtype=dtype, device=device_of(description))


def refuse_early(settings: TrainSettings) -> None:
    """Before text is made into tokens and ranks are started, both of which take long: raises UsageError for a
    model that there is not, for weights that are not its own, and for a layout that it does not fit. What
    else can be wrong with a model, its capture refuses."""
    parallel = settings.parallel
    plain = parallel.tp == parallel.cp == parallel.ep == parallel.ampipe_degree == 1
    if plain and settings.task is not None:
        return
    of, resume = trained(settings), settings.checkpoint.resume
    # Of a run that goes on, its checkpoint's weights count.
    goes_on = resume not in ("auto", "never") or (
        resume == "auto" and latest_in(settings.checkpoint_dir) is not None
    )
    if settings.model.pretrained is not None and not goes_on:
        with hollow():
            model = of.model()
        weights_of(model, weights_folder(settings.model.pretrained))
    with shapes_alone():
        model = of.model()
        if not plain:
            layout_of_run(model, settings, silent)


def likely_vocab_size(settings: TrainSettings) -> int:
    """How many tokens to plan for: the model's own number, or as many as the tokenizer may have.

    The tokenizer itself would need the text; a text with too little for `data.vocab_size` tokens gives
    fewer, and a training run then plans for those. A model that is pretrained has its own number.
    """
    model, tokens, named = settings.model, settings.data.vocab_size, settings.data.tokenizer
    rows = model.config.get("vocab_size") if isinstance(model, HuggingFaceSettings) else model.vocab_size
    if settings.task is None and model.pretrained is not None:
        return int(rows or 0)
    given = given_tokenizer(model, named) if named is not None and settings.task is None else None
    tokens = tokens if given is None else count(given.tokenizer)
    return min(int(rows), tokens) if rows else tokens


def layout_of_run(model: nn.Module, settings: TrainSettings, say: Say) -> RankLayout:
    """How the model is laid out. `say` takes what stays replicated.

    Raises UsageError for a model, a plan or sizes that do not fit.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        layout = layout_of(model, settings.parallel)
    padding, rows = "", getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(rows, int):
        key = "model.vocab_size" if isinstance(settings.model, DecoderSettings) else "model.config.vocab_size"
        size = settings.parallel.tp
        padding = f" ({key} = {-(-rows // size) * size})"  # which pads the vocabulary
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        say(f"note: {message}{padding}")
    return layout


def move(model: nn.Module, plan: Plan, rank: int, device: torch.device) -> None:
    """Move what this rank's stages use of the model to `device`, and nothing else: it may be too large."""
    if device.type == "cpu":
        return
    stages = set(plan.schedule.stages_of(plan.mesh.pp_rank(rank)))
    parameters = {p.name for p in plan.job.parameters if stages & set(p.stages)}
    buffers = {b.name for b in plan.job.buffers if stages & {*b.stages, *(s for s, _, _ in b.updates)}}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in parameters and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if f"{prefix}.{name}".lstrip(".") in buffers:
                setattr(module, name, buffer.to(device))


def kept_by(settings: TrainSettings, say: Say = silent) -> Kept | None:
    """Costs and plans of earlier runs; None where that is switched off, or there is no folder. say: as `Kept`
    has it.

    Raises UsageError for a variable that is none of the setting's values.
    """
    known = get_args(PlanningSettings.model_fields["reuse"].annotation)
    setting = settings.planning.reuse
    wish = os.environ.get(REUSE) or setting
    if wish not in known:
        raise UsageError(f"{REUSE} = {wish!r} in the environment: choose one of {', '.join(known)}")
    if wish == "off":
        return None
    renew = "renew" in (wish, setting)  # what --fresh asks for is done
    try:
        return Kept(cache_dir() / "kept", renew, say)
    except UsageError as error:
        say(f"note: costs and plan are not kept for the next run: {error}")
        return None

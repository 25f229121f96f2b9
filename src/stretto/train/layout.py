"""How a run's model is laid out over ranks.

Reads the model's modules, and calls it without values; moves them to the rank's device.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from stretto.config import DecoderSettings, HuggingFaceSettings, TrainSettings
from stretto.files.say import Say, unheard
from stretto.ir.plan import Plan
from stretto.models.build import build_model, counted_loss_function, hollow
from stretto.models.weight_files import weights_folder, weights_of
from stretto.parallelize.ampipe import check_attention
from stretto.parallelize.layout import Layout, layout_of
from stretto.tensor.dtensor_adapter import without_values
from stretto.train.checkpoint_files import latest_in
from stretto.train.task import own_task


def refuse_early(settings: TrainSettings) -> None:
    """Before text is made into tokens and ranks are started, both of which take long: raises UsageError for a
    model that there is not, for weights that are not its own, and for a layout that it does not fit. What
    else can be wrong with a model, its capture refuses."""
    parallel = settings.parallel
    plain = parallel.tp == parallel.ep == parallel.ampipe_degree == 1
    if settings.task is not None:
        if not plain:
            with without_values():
                layout_of_run(own_task(settings.task, settings.training.seed).model(), settings, unheard)
        return
    if settings.model.pretrained is not None and not _goes_on(settings):
        with hollow():
            model = build_model(settings.model, likely_vocab_size(settings), settings.training.seed)
        weights_of(model, weights_folder(settings.model.pretrained))
    with without_values():
        model = build_model(settings.model, likely_vocab_size(settings), settings.training.seed)
        if plain:
            return
        layout = layout_of_run(model, settings, unheard)
        tokens = torch.zeros(1, settings.data.sequence_length + 1, dtype=torch.int64)
        if layout.chunks is not None:
            loss = counted_loss_function(settings.model)
            check_attention(model, lambda: loss(model, tokens), layout.chunks)


def _goes_on(settings: TrainSettings) -> bool:
    """Whether there is a checkpoint, whose weights count."""
    resume = settings.checkpoint.resume
    return resume != "never" and (resume != "auto" or latest_in(settings.checkpoint_dir) is not None)


def likely_vocab_size(settings: TrainSettings) -> int:
    """How many tokens to plan for: the model's own number, or as many as the tokenizer may have.

    The tokenizer itself would need the text; a text with too little for `data.vocab_size` tokens gives
    fewer, and a training run then plans for those. A model that is pretrained has its own number.
    """
    if settings.task is None and settings.model.pretrained is not None:
        return _rows(settings)
    given = _rows(settings)
    return min(given, settings.data.vocab_size) if given else settings.data.vocab_size


def _rows(settings: TrainSettings) -> int:
    """Rows of the embedding that the settings give; 0 where they leave it to the tokenizer."""
    given = (
        settings.model.config.get("vocab_size")
        if isinstance(settings.model, HuggingFaceSettings)
        else settings.model.vocab_size
    )
    return int(given or 0)


def layout_of_run(model: nn.Module, settings: TrainSettings, say: Say) -> Layout:
    """How the model is laid out. `say` takes what stays replicated.

    Raises UsageError for a model, a plan or sizes that do not fit.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        layout = layout_of(model, settings.parallel)
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        say(f"note: {message}{_padding(model, settings)}")
    return layout


def move(model: nn.Module, plan: Plan, rank: int, device: torch.device) -> None:
    """Move what this rank's stages use of the model to `device`, and nothing else: it may be too large."""
    if device.type == "cpu":
        return
    stages = set(plan.schedule.stages_of(plan.mesh.place(rank)))
    parameters = {p.name for p in plan.job.parameters if stages & set(p.stages)}
    buffers = {b.name for b in plan.job.buffers if stages & {*b.stages, *(s for s, _, _ in b.updates)}}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in parameters and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if f"{prefix}.{name}".lstrip(".") in buffers:
                setattr(module, name, buffer.to(device))


def _padding(model: nn.Module, settings: TrainSettings) -> str:
    """The setting that pads the vocabulary."""
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(rows, int):
        return ""
    size = settings.parallel.tp
    key = "model.vocab_size" if isinstance(settings.model, DecoderSettings) else "model.config.vocab_size"
    return f" ({key} = {-(-rows // size) * size})"

"""From settings to a model and its loss: Stretto's GPT, or a class of `transformers`, with fresh weights.

`transformers` is imported when it is asked for, since most of Stretto works without it. `hollow` is for
models whose parameters get their values elsewhere, part by part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from stretto.batch.loss import Loss
from stretto.config import GPTSettings, HuggingFaceSettings, MoESettings
from stretto.config.pretrained import NOT_OF_THE_MODEL, transformers_for, unknown_keys
from stretto.errors import UsageError, meant
from stretto.models.adapters import adapted
from stretto.models.gpt import (
    GPT,
    GPTConfig,
    count_targets,
    cross_entropy,
    inputs_and_targets,
    next_token_sum,
    positions_of,
)
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum

ModelSettings = GPTSettings | MoESettings | HuggingFaceSettings

CAUSAL = ("ForCausalLM", "LMHeadModel")

END_OF_TEXT_ID = 0
"""The token between documents, as `stretto.train.text` numbers it; architectures' own numbers for the
begin and the end of a text are those of other tokenizers."""


def build_model(settings: ModelSettings, vocab_size: int, seed: int, *, empty: bool = False) -> nn.Module:
    """The model that the settings describe, for token ids below `vocab_size`, with weights from `seed`.

    empty: its parameters are on "meta", as in `hollow`, but for those of an adapter, which no weights bring.
    Under `torch.device("meta")` it has shapes and no values. The global random state is left as it was.
    Raises UsageError for a model that does not exist, cannot be built, or has too small a vocabulary.
    """
    with hollow() if empty else nullcontext():
        model = _build(settings, vocab_size, seed)
    adapter = settings.adapter if isinstance(settings, HuggingFaceSettings) else None
    return model if adapter is None else adapted(model, adapter, settings.pretrained or "", seed)


def _build(settings: ModelSettings, vocab_size: int, seed: int) -> nn.Module:
    if isinstance(settings, HuggingFaceSettings):
        return _build_huggingface(settings, vocab_size, seed)
    rows = settings.vocab_size or vocab_size
    if rows < vocab_size:
        raise UsageError(
            f"model.vocab_size = {rows} is too small: the tokenizer has {vocab_size} tokens; leave it out"
        )
    sizes = settings.model_dump(exclude={"kind", "vocab_size", "pretrained"})
    if isinstance(settings, GPTSettings):
        return GPT(GPTConfig(vocab_size=rows, **sizes), seed)
    return MoEGPT(MoEConfig(vocab_size=rows, **sizes), seed)


def counted_loss_function(settings: ModelSettings) -> Loss:
    """`loss(model, batch)`: (sum, count) of the next-token loss in nats, as a training takes it: every token
    weighs alike. For `batch` see `gpt.inputs_and_targets`."""
    return {"huggingface": huggingface_sum, "moe": moe_token_sum, "gpt": next_token_sum}[settings.kind]


def huggingface_sum(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int]:
    """(sum, count) of the next-token loss of a causal language model of `transformers`, in nats.

    The model gets `input_ids` (and `position_ids`, where documents of a row are kept apart), and the loss is
    taken here: `model(labels=...)` shifts the labels itself, and so would either read one token more than a
    sequence has, or leave its last one out. Thus
    every kind of model is measured on the same tokens. A mixture of experts whose configuration has
    `output_router_logits` adds its balancing loss while it trains, which counts for every token.
    """
    inputs_BS, targets_BS = inputs_and_targets(batch)
    positions = positions_of(batch, "position_ids")
    output = model(input_ids=inputs_BS, use_cache=False, **positions)
    loss, count = cross_entropy(output.logits, targets_BS, "sum"), count_targets(batch)
    balance = getattr(output, "aux_loss", None)
    if balance is None or not model.training:
        return loss, count
    return loss + model.config.router_aux_loss_coef * balance * count, count  # type: ignore[union-attr]


def _build_huggingface(settings: HuggingFaceSettings, vocab_size: int, seed: int) -> nn.Module:
    transformers = transformers_for("model.kind = 'huggingface'")
    name = settings.architecture
    try:
        kind = getattr(transformers, name)
    except (AttributeError, ImportError):
        kind = None
    config_class = getattr(kind, "config_class", None)
    if config_class is None or not hasattr(kind, "forward"):
        models = [one for one in dir(transformers) if one.endswith(CAUSAL)]
        raise UsageError(
            f"model.architecture = {name!r}: transformers {transformers.__version__} has no such model; "
            f"{meant(name, models)}give the name of a class such as 'LlamaForCausalLM'"
        )
    if not name.endswith(CAUSAL):
        raise UsageError(
            f"model.architecture = {name!r} does not predict the next token; "
            "give a causal language model, such as 'LlamaForCausalLM'"
        )
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    values = {"vocab_size": vocab_size, **ends, **settings.config}
    if not isinstance(values["vocab_size"], int) or values["vocab_size"] < vocab_size:
        raise UsageError(
            f"model.config.vocab_size = {values['vocab_size']!r} is too small: the tokenizer has "
            f"{vocab_size} tokens; leave it out"
        )
    faults = []
    for key in settings.config:
        if (advice := NOT_OF_THE_MODEL.get(key)) is not None:
            faults.append(f"model.config.{key} changes nothing of the model: {advice}")
    for key in unknown_keys(kind, settings.config):
        near = meant(key, vars(config_class()), "; {}")
        faults.append(f"model.config.{key}: {config_class.__name__} has no such setting{near}")
    if faults:
        raise UsageError("\n".join(faults))
    devices = [] if not torch.cuda.is_available() else list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        try:
            model = kind(config_class(**values))
        except Exception as error:
            raise UsageError(f"model.config: {name} cannot be built from it: {error}") from error
    assert isinstance(model, nn.Module)
    return model.train()


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules that are made within are on "meta", with shapes and no values."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Draws nothing into tensors that have no values: PyTorch would load its compiler to do so."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        filled = args[0] if args else named.get("tensor")
        draws = func in _DRAWS or getattr(func, "__module__", "") == nn.init.__name__
        if draws and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        return func(*args, **named)


_DRAWS = (Tensor.normal_, Tensor.uniform_)


@contextmanager
def hollow() -> Iterator[None]:
    """Modules that are made within have their parameters on "meta", and their buffers with values.

    Under `torch.device("meta")` buffers have no values either, and most are in no file: a model computes them
    as it is made. The memory of a parameter is given back as it is registered, before anything is written
    into it, in the thread that enters.
    """
    own = threading.get_ident()

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != own:
            return None  # as it is; so what is tied stays tied
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        hook.remove()

"""Text as a task: tokens, a model of `[model]`, its next-token loss, and a sample of text at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import nn

from stretto.config import TrainSettings
from stretto.files.say import Say
from stretto.models.build import build_model, counted_loss_function, hollow
from stretto.models.gpt import generate
from stretto.train.checkpoint_files import TOKENIZER
from stretto.train.data import TextData, prepare_data
from stretto.train.task import Task, check_files, own_task
from stretto.train.text import given_tokenizer

if TYPE_CHECKING:
    from stretto.runtime import Runner

SAMPLE_PROMPT_TOKENS = 16
"""How much held-out text a sample continues: a line or two of code, enough to see whether it goes on well."""
SAMPLE_TEMPERATURE = 0.8
"""Below 1, so that small models stay readable. Assumed."""


def task_of(settings: TrainSettings, say: Say) -> Task:
    """What the settings say to train: text, or a task of one's own. `say` takes lines of progress.

    Raises UsageError for text that cannot be read, and for a file that gives no task.
    """
    check_files(settings)
    if settings.task is not None:
        return own_task(settings.task, settings.training.seed)
    return text_task(settings, prepare_data(settings.data, say, given_tokenizer(settings.model)))


def text_task(settings: TrainSettings, data: TextData) -> Task:
    """Text that is prepared, as a task."""
    training, length = settings.training, settings.data.sequence_length
    tokenizer = data.tokenizer.to_str()

    def report(model: nn.Module, folder: Path, say: Say) -> Mapping[str, Any]:
        # int64 because tokens are stored in the smallest type that fits them.
        prompt = torch.from_numpy(data.held_out.tokens[:SAMPLE_PROMPT_TOKENS].astype("int64"))
        before, after = write_sample(
            model, data.tokenizer, prompt, training.sample_tokens, length, training.seed
        )
        say("")
        say(f"a sample, continuing held-out text {before!r}:")
        for line in after.splitlines():
            say(f"  | {line}")
        return {"sample": after}

    source = settings.model.pretrained

    def make() -> nn.Module:
        with hollow() if source is not None else nullcontext():
            return build_model(settings.model, data.vocab_size, training.seed)

    def fill(runner: Runner, model: nn.Module) -> None:
        from stretto.saving import pretrained  # with all that a Runner needs, which a launcher does without

        assert source is not None
        pretrained.fill(runner, model, source)

    entropy = data.unigram_entropy_nats
    return Task(
        model=make,
        fill=fill if source is not None else None,
        loss=counted_loss_function(settings.model),
        train=data.train.batch,
        held_out=data.held_out.batch,
        digest=data.digest,
        report=report if training.sample_tokens else None,
        unit="tokens",
        size=length,
        held_out_words=(" nats a token", f"; token frequencies alone give {entropy:.4f}"),
        summary={"unigram_entropy": entropy},
        where=str(data.folder),
        kept=(TOKENIZER, tokenizer),
        key="data.paths",
        source="the text in data.paths",
        differing="the text differs, or the tokenizers package",
        vocab_size=data.vocab_size,
    )


def write_sample(
    model: nn.Module, tokenizer: Tokenizer, prompt_ids: torch.Tensor, tokens: int, context: int, seed: int
) -> tuple[str, str]:
    """The text of `prompt_ids` (S,) and the `tokens` tokens that the model continues it with."""
    generator = torch.Generator().manual_seed(seed)
    ids = generate(model, prompt_ids, tokens, SAMPLE_TEMPERATURE, generator, context).tolist()
    start = len(prompt_ids)
    return tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])

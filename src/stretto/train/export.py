"""Export: a checkpoint becomes a folder of weights as safetensors, with the tokenizer of a run on text, for
others to read.

Reads a checkpoint and writes one folder.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn

from stretto.config import HuggingFaceSettings, TrainSettings
from stretto.errors import StrettoError, UsageError
from stretto.models.adapters import base_of, is_adapted
from stretto.models.gpt import GPT
from stretto.models.pretrained import save_gpt
from stretto.models.weight_files import weights_folder
from stretto.train.checkpoint import load_model
from stretto.train.checkpoint_files import TOKENIZER, find, read_kept, read_state
from stretto.train.text import END_OF_TEXT, given_tokenizer

GENERATION = "generation_config.json"
"""Where `transformers` keeps how a model generates."""


def export(source: Path, output: Path, task_file: str | None = None) -> Path:
    """Write the model of a checkpoint into the new folder `output`; returns the checkpoint that was read.

    source: a checkpoint, or the folder of a run, whose newest is taken. A model of `transformers` is written
    so that `AutoModelForCausalLM.from_pretrained(output)` and `AutoTokenizer` read it, an adapter of one so
    that `peft.PeftModel.from_pretrained(model, output)` does; a GPT so that
    `stretto.models.pretrained.load_gpt(output)` does. Of a task only the model is written,
    as its tokenizer is the task's own; task_file: the one that makes it, a program (`load_model`).

    Raises UsageError when there is no checkpoint or `output` is not empty, StrettoError when the
    checkpoint cannot be read or the folder not written; `output` is then as it was.
    """
    checkpoint = find(source)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and is not an empty folder; name another, or remove it")
    is_text = read_state(checkpoint).settings.get("task") is None
    tokenizer = read_kept(checkpoint) if is_text and (checkpoint / TOKENIZER).exists() else None
    model, settings = load_model(checkpoint, task_file)
    library = sys.modules.get("transformers")  # which is not imported to find out that a model is none of it
    _, base = base_of(model)
    if not isinstance(model, GPT) and not (library and isinstance(base, library.PreTrainedModel)):
        raise UsageError(
            f"{checkpoint} is of a task of your own (task.file), whose model is a {type(model).__name__}, "
            "and export writes Stretto's GPT and models of transformers: read its weights with stretto.load"
        )
    # Beside `output`, so that this comes to be at once; within it where it exists, because it may be a mount.
    partial = (output if output.exists() else output.parent) / f".{output.name}.{os.getpid()}.tmp"
    try:
        partial.mkdir(parents=True)
        if not isinstance(model, GPT):
            _save_huggingface(model, settings.model.pretrained if is_text else None, partial)
            if tokenizer is not None:
                _save_tokenizer(tokenizer, settings, partial)
        else:
            save_gpt(model, partial)
            if tokenizer is not None:
                (partial / TOKENIZER).write_text(tokenizer, encoding="utf-8")
        if output.exists():
            for path in partial.iterdir():
                path.rename(output / path.name)
        else:
            partial.rename(output)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise StrettoError(f"cannot write {output}: {reason}; see to it, or name another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint


def _save_huggingface(model: nn.Module, pretrained: str | None, output: Path) -> None:
    """pretrained: where it started from, whose way to generate is kept. Of an adapted model the adapter is
    written, and nothing of what it changes."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if is_adapted(model):
        model.save_pretrained(output, save_embedding_layers=False)  # type: ignore[operator]
        return
    model.save_pretrained(output)  # type: ignore[operator]
    if pretrained is not None:
        with suppress(UsageError, OSError):
            shutil.copyfile(weights_folder(pretrained) / GENERATION, output / GENERATION)


def _save_tokenizer(text: str, settings: TrainSettings, output: Path) -> None:
    """text: of the run's tokenizer. One that settings name is copied with all that it has beside it (the
    template of a chat), as long as it is there and the same."""
    import transformers

    model, named = settings.model, settings.data.tokenizer
    assert isinstance(model, HuggingFaceSettings)
    kind: Any = transformers.PreTrainedTokenizerFast  # carries no types
    own = Tokenizer.from_str(text)
    if model.pretrained is None and named is None:
        begin: str | None = END_OF_TEXT
        end: str | None = END_OF_TEXT
    else:
        with suppress(UsageError):
            given = given_tokenizer(model, named)
            if given is not None and given.of_transformers is not None and given.tokenizer.to_str() == text:
                given.of_transformers.save_pretrained(output)
                return
        begin, end = (_token(own, model.config.get(key)) for key in ("bos_token_id", "eos_token_id"))
    kind(tokenizer_object=own, eos_token=end, bos_token=begin).save_pretrained(output)


def _token(tokenizer: Tokenizer, number: Any) -> str | None:
    """The token of a configuration's number, which may be a list of them, or none."""
    first = number[0] if isinstance(number, list) and number else number
    return tokenizer.id_to_token(first) if isinstance(first, int) else None

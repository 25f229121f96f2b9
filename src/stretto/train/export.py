"""Export: a checkpoint becomes a folder of weights as safetensors, with the tokenizer of a run on text, for
others to read.

Reads a checkpoint and writes one folder.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stretto.errors import StrettoError, UsageError
from stretto.models.gpt import GPT
from stretto.models.pretrained import save_gpt
from stretto.train.checkpoint_files import TOKENIZER, find, read_kept, read_state
from stretto.train.tokenizer import END_OF_TEXT
from stretto.train.whole import load_whole


def export(source: Path, output: Path) -> Path:
    """Write the model of a checkpoint into the new folder `output`; returns the checkpoint that was read.

    source: a checkpoint, or the folder of a run, whose newest is taken. A model of `transformers` is written
    so that `AutoModelForCausalLM.from_pretrained(output)` and `AutoTokenizer` read it; a GPT so that
    `stretto.models.pretrained.load_gpt(output)` does. Of a task the model alone is written,
    as its tokenizer is the task's own.

    Raises UsageError when there is no checkpoint or `output` holds something, StrettoError when the
    checkpoint cannot be read or the folder not written; `output` is then as it was.
    """
    checkpoint = find(source)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and is not an empty folder; name another, or remove it")
    is_text = read_state(checkpoint).settings.get("task") is None
    tokenizer = read_kept(checkpoint) if is_text else None
    model, _ = load_whole(checkpoint)
    if not isinstance(model, GPT) and not _is_huggingface(model):
        raise UsageError(
            f"{checkpoint} is of a task of one's own (task.file), whose model is a {type(model).__name__}, "
            "and export writes Stretto's GPT and models of transformers: read its weights with stretto.load"
        )
    # Beside `output`, so that this comes to be at once; within it where it exists, because it may be a mount.
    partial = (output if output.exists() else output.parent) / f".{output.name}.{os.getpid()}.tmp"
    try:
        partial.mkdir(parents=True)
        if not isinstance(model, GPT):
            _save_huggingface(model, partial)
            if tokenizer is not None:
                _save_tokenizer(checkpoint, partial)
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


def _is_huggingface(model: object) -> bool:
    """Whether a model is one of `transformers`, which is not imported to find out that it is none."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _save_huggingface(model: object, output: Path) -> None:
    import transformers

    assert isinstance(model, transformers.PreTrainedModel)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(output)


def _save_tokenizer(checkpoint: Path, output: Path) -> None:
    import transformers

    kind: Any = transformers.PreTrainedTokenizerFast  # carries no types
    tokenizer = kind(tokenizer_file=str(checkpoint / TOKENIZER), eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    tokenizer.save_pretrained(output)

"""The tokenizer that a pretrained model brings, and what stands around a document in its tokens.

Reads the files that lie beside the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from stretto.config import HuggingFaceSettings, Model
from stretto.config.pretrained import transformers_for
from stretto.errors import UsageError
from stretto.models.hub import weights_folder
from stretto.train import tokenizer as bpe
from stretto.train.checkpoint_files import TOKENIZER


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """begin: tokens before each document, as the tokenizer itself puts there. end: the token behind it."""

    tokenizer: Tokenizer
    begin: tuple[int, ...]
    end: int


def learned(tokenizer: Tokenizer) -> GivenTokenizer:
    """One that was learned here (`train.tokenizer`)."""
    end = tokenizer.token_to_id(bpe.END_OF_TEXT)
    assert end is not None
    return GivenTokenizer(tokenizer, (), end)


def given_tokenizer(model: Model) -> GivenTokenizer | None:
    """The tokenizer of `model.pretrained`; None without that.

    Raises UsageError where there is none, where it has no token for the end of a text, and where it has more
    tokens than the model has rows.
    """
    if model.pretrained is None:
        return None
    what = f"model.pretrained = {model.pretrained!r}"
    if isinstance(model, HuggingFaceSettings):
        found, rows = _of_transformers(model.pretrained, what), model.config.get("vocab_size")
    else:
        found, rows = _own(model.pretrained, what), model.vocab_size
    if not isinstance(rows, int):
        raise UsageError(
            f"{what}: the settings lack the model's vocab_size: let stretto.config.load_settings read them, "
            "which adds what the folder says"
        )
    count = bpe.count(found.tokenizer)
    if count > rows:
        raise UsageError(
            f"{what}: its tokenizer has {count} tokens, and its model has an embedding of {rows}: the "
            "folder has the tokenizer of another model"
        )
    return found


def _own(source: str, what: str) -> GivenTokenizer:
    """That of what `stretto export` wrote."""
    path = weights_folder(source) / TOKENIZER
    try:
        tokenizer = bpe.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{what} has no {TOKENIZER}: export the run on text again, or copy its tokenizer there"
        ) from None
    except Exception as error:  # of the library, which has no class of its own for them
        raise UsageError(f"{path} cannot be read: {error}") from None
    end = tokenizer.token_to_id(bpe.END_OF_TEXT)
    if end is None:
        raise UsageError(f"{path} has no token {bpe.END_OF_TEXT}: it is of another model")
    return GivenTokenizer(tokenizer, (), end)


def _of_transformers(source: str, what: str) -> GivenTokenizer:
    """That which `AutoTokenizer` finds, as it is: texts that hold its special tokens have them."""
    auto: Any = transformers_for(what).AutoTokenizer
    try:
        found = auto.from_pretrained(source, trust_remote_code=False)
        tokenizer = Tokenizer.from_str(found.backend_tokenizer.to_str())
    except Exception as error:  # whatever files of others make of it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"{what}: transformers finds no fast tokenizer: {lines[0]}; put the tokenizer's files beside the "
            "weights (tokenizer.save_pretrained)"
        ) from None
    if found.eos_token_id is None:
        raise UsageError(
            f"{what}: its tokenizer has no eos_token, which stands behind each document: set it, and "
            "tokenizer.save_pretrained"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    whole, bare = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
    return GivenTokenizer(tokenizer, tuple(whole[: starts[0]]) if starts else (), int(found.eos_token_id))

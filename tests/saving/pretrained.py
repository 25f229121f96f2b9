"""Small folders of weights for tests, as `save_pretrained` writes them, with their tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from stretto.train import text as bpe
from stretto.train.encode import count
from tests.runtime.equality import from_transformers
from tests.train.tiny import WORDS

BEGIN = "<s>"
SIZES: dict[str, Any] = {
    "vocab_size": 310,  # more than the tokenizer has
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 300,
    "eos_token_id": 0,
    "attention_dropout": 0.0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


@cache
def tokenizer() -> Tokenizer:
    """300 tokens that are learned, and one that begins each text."""
    found = bpe.learn([WORDS] * 9, 300)
    found.add_special_tokens([*(f"<unused {n}>" for n in range(300 - count(found))), BEGIN])
    found.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 300)])
    return found


def write_pretrained(folder: Path, name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """Weights in several files, where they are large enough, and the tokenizer."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    architecture, own = KINDS[name]
    model: Any = from_transformers(architecture, **{**SIZES, **own, **more})
    model.to(dtype).save_pretrained(folder, max_shard_size="90KB")
    kind: Any = transformers.PreTrainedTokenizerFast
    kind(
        tokenizer_object=tokenizer(),
        eos_token=bpe.END_OF_TEXT,
        bos_token=BEGIN,
        chat_template="{{ messages[0].content }}",
    ).save_pretrained(folder)
    return folder

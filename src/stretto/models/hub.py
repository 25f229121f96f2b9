"""Where pretrained weights lie: a folder, or what the Hugging Face Hub's own cache has of a model.

The Hub's library downloads what is lacking, if it can.
"""

from __future__ import annotations

from pathlib import Path

from stretto.errors import UsageError

NEEDED = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "*.json",
    "tokenizer*",
    "*.model",
    "*.jinja",
    "*.txt",
)
"""Files of a model of the Hub: weights as safetensors, and what tokenizers are made of."""


def weights_folder(source: str) -> Path:
    """The folder of what `model.pretrained` names. Raises UsageError for a name that the Hub does not know,
    or that is not in the cache while the Hub cannot be reached."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute():
        raise UsageError(f"{source} is no folder here: name a folder of weights that every machine has")
    from huggingface_hub import snapshot_download  # comes with transformers

    try:
        return Path(snapshot_download(source, allow_patterns=list(NEEDED)))
    except Exception as error:  # whatever the network makes of it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"model.pretrained = {source!r} is no folder here, and the Hub says: {lines[0]}"
        ) from None

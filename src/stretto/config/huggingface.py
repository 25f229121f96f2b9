"""What configurations of `transformers` say of a model, as settings.

`transformers` is imported when it is asked for, since most of Stretto works without it. Reads a
configuration, and no weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.near import near_path

NOT_OF_THE_MODEL = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "torch_dtype",
        "transformers_version",
    }
)
"""Keys of a config.json that its settings have otherwise, or that say how it was written."""
WRITTEN = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys that are written down even where they are the class's defaults, because settings have others."""


def transformers_for(what: str) -> Any:
    """The library. what: what needs it. Raises UsageError where it is absent."""
    try:
        import transformers
    except ImportError:
        raise UsageError(f"{what} needs transformers: pip install 'stretto[hf]'") from None
    return transformers


def settings_of(source: str, what: str) -> dict[str, Any]:
    """`[model]` of a folder that `save_pretrained` wrote, or of a name of the Hub. what: the setting, for
    messages.

    Raises UsageError for what is none, for no causal language model, and for quantised weights.
    """
    transformers = transformers_for(what)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever a file of others, or the network, makes of it
        near = near_path(source, "{} ") if not Path(source).exists() else ""
        raise UsageError(
            f"{what}: transformers finds no configuration: {_in_short(error)}; {near}name a folder that "
            "`save_pretrained` wrote, or a model of the Hub that is in the cache or can be reached"
        ) from None
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"{what}: its weights are quantised, which are not trained: take plain ones")
    kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kinds is None:
        raise UsageError(
            f"{what} is a {config.model_type!r}, of which transformers has no causal language model"
        )
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    named = [kind for kind in kinds if kind.__name__ in (config.architectures or ())]
    kind = (named or kinds)[0]
    values = {
        **config.to_diff_dict(),
        **{key: getattr(config, key) for key in WRITTEN if hasattr(config, key)},
    }
    strange = unknown_keys(kind, values)  # of the author's, or of older versions; they change nothing
    dropped = NOT_OF_THE_MODEL | set(strange)
    if not isinstance(values.get("vocab_size"), int):
        raise UsageError(f"{what}: its configuration has no vocab_size: it is no model of text alone")
    return {
        "kind": "huggingface",
        "architecture": kind.__name__,
        "config": {key: value for key, value in values.items() if key not in dropped},
    }


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def unknown_keys(kind: Any, given: Mapping[str, Any]) -> list[str]:
    """Keys that a model and its configuration class have no use for. What the class does not know it keeps
    under the same name; an older name of a known one (`rope_theta`, which is a part of `rope_parameters` now)
    it does not keep. A model's code may ask by name for what its class does not know (`head_dim`), and so may
    the class itself (`partial_rotary_factor` of Phi-3)."""
    config_class = kind.config_class
    known = vars(config_class())
    strange = [key for key in given if key not in known and not hasattr(config_class, key)]
    if not strange:
        return []
    code = inspect.getsource(inspect.getmodule(kind) or kind)
    code += inspect.getsource(config_class)
    asked = ('(config, "{}"', 'kwargs.get("{}"', 'kwargs.pop("{}"')
    strange = [key for key in strange if not any(form.format(key) in code for form in asked)]
    try:
        kept = vars(config_class(**{key: given[key] for key in strange}))
    except Exception:
        return []  # a value that it cannot read, as building the model will say
    return [key for key in strange if key in kept]

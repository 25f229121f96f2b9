"""Models that others have configured: what `model.pretrained` and `transformers` say of a model, as settings.

Reads configurations, and no weight. `transformers` is imported when it is asked for, since most of Stretto
works without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.config.model import GPTSettings
from stretto.errors import UsageError, near_path
from stretto.files.parse import parse_json
from stretto.files.say import Say, silent

BUILT_IN = {"stretto-gpt": "gpt", "stretto-moe": "moe"}
"""What config.json calls models that `stretto export` writes -> their kind in settings."""
CONFIG = "config.json"
FREE = frozenset({"dropout", "capacity_factor", "aux_weight", "z_weight"})
"""Settings of own models that may differ from those that weights were trained with."""
NOT_OF_THE_MODEL = {
    **dict.fromkeys(
        ("name_or_path", "_name_or_path", "pretrained_model_name_or_path"),
        "give model.pretrained, which brings its weights too",
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), "give precision, at the top of the settings"),
    **dict.fromkeys(("architectures", "model_type"), "give model.architecture"),
    **dict.fromkeys(("auto_map", "transformers_version"), "it says how a file was written"),
    "quantization_config": "weights are not quantised",
}
"""Keys of a configuration that change nothing of a model that is made from it -> what to do."""
WRITTEN = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys that are written down even where they are the class's defaults, because settings have others."""


def complete(values: dict[str, Any], begin: Say = silent) -> None:
    """Add to the values of a run's settings what `model.pretrained` says of the model, if that is given.
    begin: receives what is done, before that takes long.

    Raises UsageError where it names nothing that can be read, and for what is given beside it and is of
    another model.
    """
    given = values.get("model")
    if not isinstance(given, dict) or not isinstance(given.get("pretrained"), str) or not given["pretrained"]:
        return  # nothing to do, or a fault that is reported with the others
    source = given["pretrained"]
    what = f"model.pretrained = {source!r}"
    name = _own_name(source, what)
    if name is not None:
        known, free = _own(Path(source).expanduser(), name), FREE
        if known.get("positions") == "rotary":
            free = free | {"context"}
        values["model"] = {**known, **given}
    else:
        begin(f"looking at {source}")
        given_config = given.get("config", {})
        known, free = settings_of(source, what), frozenset({"config"})
        values["model"] = {**known, **given}
        if isinstance(given_config, dict):
            values["model"]["config"] = {**known["config"], **given_config}
    faults = [
        f"model.{key} = {given[key]!r}, but {what} is of a model with {key} = {value!r}: drop it"
        for key, value in known.items()
        if key in given and key not in free and given[key] != value
    ]
    if faults:
        raise UsageError("\n".join(faults))


def _own_name(source: str, what: str) -> str | None:
    """What an own model's config.json calls it; None for a model of `transformers`."""
    path = Path(source).expanduser()
    if not path.is_dir():
        # A name of the Hub is one word, or two around a slash.
        if path.exists() or source.startswith((".", "/", "~")) or len(path.parts) > 2:
            no = "is no folder" if path.exists() else f"does not exist (seen from {Path.cwd()})"
            raise UsageError(f"{what} {no}; {near_path(path, '{} ')}name a folder of weights")
        return None
    data = _read(path)
    kind = data.get("model_type") if isinstance(data, Mapping) else None
    return str(kind) if kind in BUILT_IN else None


def _own(folder: Path, name: str) -> dict[str, Any]:
    """The settings of a model that `stretto export` wrote."""
    data = dict(_read(folder))
    data.pop("model_type")
    unknown = [
        key for key in GPTSettings.model_fields if key not in data and key not in ("kind", "pretrained")
    ]
    if unknown:
        raise UsageError(
            f"{folder / CONFIG} lacks {unknown[0]}: take another folder that `stretto export` wrote"
        )
    return {"kind": BUILT_IN[name], **data}


def _read(folder: Path) -> Any:
    path = folder / CONFIG
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(
            f"model.pretrained = {str(folder)!r} has no {CONFIG}: name a folder that `stretto export` or "
            "`save_pretrained` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


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
        line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UsageError(
            f"{what}: transformers finds no configuration: {line}; {near}name a folder that "
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
    dropped = {*NOT_OF_THE_MODEL, *strange}
    if not isinstance(values.get("vocab_size"), int):
        raise UsageError(f"{what}: its configuration has no vocab_size: it is no model of text alone")
    return {
        "kind": "huggingface",
        "architecture": kind.__name__,
        "config": {key: value for key, value in values.items() if key not in dropped},
    }


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

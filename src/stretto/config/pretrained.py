"""`model.pretrained`: what it names says kind and shape of the model, which complete the settings.

Reads the configuration of the folder, and no weight. A model of `transformers` is for `config.huggingface`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.config.huggingface import settings_of
from stretto.config.model import GPTSettings
from stretto.errors import UsageError
from stretto.files.near import near_path
from stretto.files.parse import parse_json
from stretto.files.say import Say, unheard

OWN = {"stretto-gpt": "gpt", "stretto-moe": "moe"}
"""What config.json calls models that `stretto export` writes -> their kind in settings."""
CONFIG = "config.json"
FREE = frozenset({"dropout", "capacity_factor", "aux_weight", "z_weight"})
"""Settings of own models that may differ from those which weights were trained with."""


def complete(values: dict[str, Any], begin: Say = unheard) -> None:
    """Add to the values of a run's settings what `model.pretrained` says of the model, if that is given.
    begin: told what is done, before that takes long.

    Raises UsageError where it names nothing that can be read, and for what is given beside it and is of
    another model.
    """
    given = values.get("model")
    if not isinstance(given, dict) or not isinstance(given.get("pretrained"), str) or not given["pretrained"]:
        return  # nothing to do, or a fault that is told with the others
    source = given["pretrained"]
    what = f"model.pretrained = {source!r}"
    name = _own_name(source, what)
    if name is not None:
        found, free = _own(Path(source).expanduser(), name), FREE
        if found.get("positions") == "rotary":
            free = free | {"context"}
        values["model"] = {**found, **given}
    else:
        begin(f"looking at {source}")
        given_config = given.get("config", {})
        found, free = settings_of(source, what), frozenset({"config"})
        values["model"] = {**found, **given}
        if isinstance(given_config, dict):
            values["model"]["config"] = {**found["config"], **given_config}
    faults = [
        f"model.{key} = {given[key]!r}, but {what} is of a model with {key} = {value!r}: drop it"
        for key, value in found.items()
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
    return str(kind) if kind in OWN else None


def _own(folder: Path, name: str) -> dict[str, Any]:
    """The settings of a model that `stretto export` wrote."""
    data = dict(_read(folder))
    data.pop("model_type")
    if "capacity_factor" in data:
        data["capacity_factor"] = data["capacity_factor"] or 0.0  # None is dropless
    unknown = [
        key for key in GPTSettings.model_fields if key not in data and key not in ("kind", "pretrained")
    ]
    if unknown:
        raise UsageError(
            f"{folder / CONFIG} lacks {unknown[0]}: take another folder that `stretto export` wrote"
        )
    return {"kind": OWN[name], **data}


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

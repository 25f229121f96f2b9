"""What the settings' fields say of themselves, as sections of rows, for page and terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.config import GPTSettings, HuggingFaceSettings, MoESettings, TrainSettings
from stretto.config.data import WeightedSource
from stretto.files.settings_file import Settings


@dataclass(frozen=True, slots=True)
class Row:
    """A setting. default: as JSON; None where there is none, and "" where the setting must be given.
    others: the other words that it may be."""

    key: str
    default: str | None
    others: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the file, by its name ("" for what is in none). kind: of model, as tables differ by it."""

    name: str
    kind: str
    text: str
    rows: tuple[Row, ...]


def sections() -> Iterator[Section]:
    """All tables of a run's settings, in the order of the tree; that of the model once for each kind."""
    yield section_of("", TrainSettings)
    for name, field in TrainSettings.model_fields.items():
        one = (field.annotation, *get_args(field.annotation))
        for kind in (GPTSettings, MoESettings, HuggingFaceSettings) if name == "model" else one:
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield section_of(name, kind)
        if name == "data":
            yield section_of("data.sources", WeightedSource)


def section_of(name: str, of: type[BaseModel]) -> Section:
    """What a class of settings says; of the tree those of its keys that are no tables."""
    tag = of.model_fields.get("kind") if name == "model" else None
    kind = str(get_args(tag.annotation)[0]) if tag is not None else ""
    fields = of.model_fields.items()
    rows = tuple(_row(key, field) for key, field in fields if not _is_table(field))
    return Section(name, kind, " ".join((of.__doc__ or "").split("\n\n")[0].split()), rows)


def _is_table(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return isinstance(field.default, Settings) or any(
        isinstance(kind, type) and issubclass(kind, Settings) for kind in kinds
    )


def _row(key: str, field: FieldInfo) -> Row:
    text = " ".join((field.description or "").split())
    if field.is_required():
        only = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        return Row(key, json.dumps(only[0]) if len(only) == 1 else "", (), text)
    value: Any = field.get_default(call_default_factory=True)
    words = [one for one in get_args(field.annotation) if isinstance(one, str)]
    several = get_origin(field.annotation) is not None and len(words) > 1
    others = tuple(json.dumps(one) for one in words if several and one != value)
    return Row(key, None if value is None else json.dumps(value), others, text)

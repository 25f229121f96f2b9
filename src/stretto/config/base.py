"""What all settings have in common, and what those have that code calls by name (`stretto.Parallel(...)`)."""

from __future__ import annotations

import re
import textwrap
from inspect import Parameter, Signature, cleandoc
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from stretto.files.settings_file import refusal

_FIRST_CLAUSE = re.compile(r"[.:;](?: |$)")


class Settings(BaseModel):
    """What all parts of the tree have in common: no unknown key, no change, no guessing of types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


if TYPE_CHECKING:
    _ListedSettings = Settings  # pydantic's metaclass has no public name
else:

    class _ListedByFields(type(BaseModel)):
        """The class of classes whose `help` lists their own properties, and nothing that pydantic adds."""

        def __dir__(cls) -> list[str]:
            own = [one for one in cls.__mro__ if issubclass(one, Settings)]
            return [name for one in own for name, what in vars(one).items() if isinstance(what, property)]

    class _ListedSettings(Settings, metaclass=_ListedByFields):
        """Settings whose `help` lists what is their own."""


class NamedArguments(_ListedSettings):
    """Settings that code calls by name. `help` shows the fields with their defaults, and a wrong argument
    raises UsageError that names it and what is allowed."""

    if not TYPE_CHECKING:  # else a type checker would take any argument: pydantic shows it the fields

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise refusal(type(self).__name__, type(self), error) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Describe the fields in the class's documentation, and leave their checks out of its signature."""
        fields = cls.model_fields.items()
        cls.__doc__ = "\n".join([cleandoc(cls.__doc__ or ""), "", *(_row(*one) for one in fields)])
        cls.__signature__ = Signature(
            [
                Parameter(
                    name,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if field.is_required() else field.default,
                )
                for name, field in fields
            ]
        )


def _row(name: str, field: FieldInfo) -> str:
    """A field, its default, the first clause of what it is, and the words that it may be."""
    default = "(required)" if field.is_required() else f"= {field.default!r}"
    text = _FIRST_CLAUSE.split(" ".join((field.description or "").split()), maxsplit=1)[0]
    if get_origin(field.annotation) is Literal:
        text += f": {', '.join(map(repr, get_args(field.annotation)))}"
    lines = textwrap.wrap(text, 70)
    starts = [f"{name} {default}", *[""] * len(lines)]
    return "\n".join(f"{start:35} {line}" for start, line in zip(starts, lines, strict=False))

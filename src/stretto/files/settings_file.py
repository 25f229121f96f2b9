"""Trees of settings: what their classes have in common, how one is read from a TOML file and overrides, how
its faults are worded, and how values of a file are changed.

Works on any pydantic tree; which settings there are is for `stretto.config`. It may read the one file
that it is given.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import tomlkit
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from tomlkit.items import Table

from stretto.errors import UsageError, meant
from stretto.files.parse import parse_toml
from stretto.files.typed_file import read_text

Tree = TypeVar("Tree", bound=BaseModel)

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
                faults = "; ".join(line for _, line in _worded(type(self), error, "", {}))
                raise UsageError(f"{type(self).__name__}: {faults}") from None

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


def read_settings(
    kind: type[Tree],
    path: str | Path,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, object] | None = None,
    complete: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Tree:
    """Read the tree `kind` from the TOML file `path`, changed by `overrides` such as `optimizer.lr=1e-3`.

    `defaults` fill top-level keys that neither gives; `complete` then adds to the values what follows from
    them, before they are checked, and may raise UsageError. Raises UsageError that lists every fault with the
    file or override, the key, the value, and what is allowed.
    """
    values = read_toml(Path(path), "settings file")
    origin = _apply_overrides(values, overrides)
    for key, value in (defaults or {}).items():
        values.setdefault(key, value)
    complete(values)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = _worded(kind, error, str(path), origin)
        raise UsageError("\n".join(f"{source}: {fault}" for source, fault in faults)) from None


def faults_of(
    kind: type[BaseModel], values: Mapping[str, Any], source: str, origin: Mapping[str, str]
) -> list[tuple[str, str]]:
    """What is wrong with the values of a tree, as `read_settings` would say it: where each fault comes from
    (origin: by key, else `source`), and its line; none where nothing is."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        return _worded(kind, error, source, origin)
    return []


def _worded(
    kind: type[BaseModel], error: ValidationError, source: str, origin: Mapping[str, str]
) -> list[tuple[str, str]]:
    lines: dict[tuple[str, str], list[str]] = {}
    for fault in error.errors(include_url=False):
        owner, key = _key_path(kind, fault)
        place = next((text for name, text in origin.items() if _within(key, name)), source)
        start, rest = _explain(kind, owner, key, fault)
        # Where a word or a list is allowed, pydantic reports a fault for each: they are one.
        lines.setdefault((place, start), []).append(rest)
    return [
        (place, f"{start}: {line}" if start else line)  # a fault between tables has several lines
        for (place, start), rests in lines.items()
        for line in ", or ".join(rests).split("\n")
    ]


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The data of a TOML file; what: of which kind it is, for messages. Raises UsageError."""
    text = read_text(path, what)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from None


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`training.steps`, value) for each value in a tree."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def edited(text: str, changes: Mapping[str, Any]) -> str:
    """The text of a TOML file with other values; all else stays as it was written, comments too. changes:
    dotted key -> value, None to take it out. What is not there comes at the end of its table, and that at the
    end of the file where it is not there either."""
    document = tomlkit.parse(text)
    for key, value in changes.items():
        *tables, leaf = key.split(".")
        below: Any = document
        for part in tables:
            below = below.setdefault(part, tomlkit.table())
        keys = [name for name, item in below.items() if not isinstance(item, Mapping)]
        if value is None:
            below.pop(leaf, None)
        elif leaf not in below and keys and isinstance(below, Table) and not below.is_super_table():
            # Behind the last key: tomlkit would put it behind the comments on what follows.
            last: Any = below.item(keys[-1])
            line = f"{leaf} = {tomlkit.item(value).as_string()}\n"
            last.trivia.trail = (last.trivia.trail or "\n") + line
        else:
            below[leaf] = value
    return tomlkit.dumps(document)


def _apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Change `values` in place; returns where each overridden key came from, for messages."""
    origin: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        parts = key.split(".")
        if not equals or not all(parts):
            raise UsageError(
                f"--set {override}: expected KEY=VALUE with a dotted key, for example --set optimizer.lr=1e-3"
            )
        table = values
        for depth, part in enumerate(parts[:-1], start=1):
            below = table.setdefault(part, {})
            if not isinstance(below, dict):
                raise UsageError(
                    f"--set {override}: {'.'.join(parts[:depth])} = {below!r} is a value; "
                    f"it has no {parts[depth]!r}"
                )
            table = below
        if text.strip():
            table[parts[-1]] = parse_value(text)
        else:
            table.pop(parts[-1], None)
        origin[key] = f"--set {override}"
    return origin


_PART = re.compile(r"""(?:"[^"]*"|'[^']*'|\[[^\[\]]*\]|[^,\[\]"'])+""")
"""A part of a list: up to a comma that is in no quotes and in no list within."""
_LIST = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")


def parse_value(text: str) -> Any:
    """The TOML value that `text` spells, or else the text itself, so that names need no quotes: not by
    themselves, and not in a list (`[a, b]`)."""
    text = text.strip()
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        parsed = {}
    # No setting is a date, but a name may look like one.
    if parsed.keys() == {"value"} and not isinstance(parsed["value"], date | time):
        return parsed["value"]
    if text.startswith("[") and text.endswith("]") and _LIST.fullmatch(text[1:-1]):
        return [parse_value(part) for part in _PART.findall(text[1:-1])]
    return text


def _within(key: str, name: str) -> bool:
    return key == name or key.startswith((name + ".", name + "["))


def _trees(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes named anywhere in a field's annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _trees(argument)


def _key_path(kind: type[BaseModel], fault: ErrorDetails) -> tuple[type[BaseModel], str]:
    """The settings class that the fault is in, and the key as the user writes it.

    Pydantic's location also has marks of its own: the chosen member of a union, or the type that was
    tried; they are no keys and are left out.
    """
    candidates = [kind]
    key = ""
    loc = fault["loc"]
    for depth, part in enumerate(loc):
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        unknown = fault["type"] == "extra_forbidden" and depth == len(loc) - 1
        if unknown or any(part in tree.model_fields for tree in candidates):
            key = f"{key}.{part}" if key else part
            if not unknown:
                below = [one for tree in candidates for one in _trees(_annotation(tree, part))]
                candidates = below or candidates
        else:
            candidates = [tree for tree in candidates if part in _tags(tree)] or candidates
    return candidates[0], key


def _annotation(tree: type[BaseModel], name: str) -> Any:
    field = tree.model_fields.get(name)
    return field.annotation if field is not None else None


def _tags(tree: type[BaseModel]) -> tuple[Any, ...]:
    """The values of `kind` that choose this member of a union."""
    return get_args(_annotation(tree, "kind"))


def _explain(root: type[BaseModel], owner: type[BaseModel], key: str, fault: ErrorDetails) -> tuple[str, str]:
    """What is wrong, and what is allowed instead."""
    what, value = fault["type"], fault["input"]
    context = fault.get("ctx", {})
    if what == "extra_forbidden":
        kinds = _other_kinds(root, owner, key)
        if kinds:
            own = " or ".join(repr(tag) for tag in _tags(owner))
            others = " or ".join(kinds)
            return f"{key} = {value!r}", f"is no setting of kind {own}, but of {others}; drop it"
        return f"{key} = {value!r}", f"there is no such setting; {_nearest(root, owner, key)}"
    if what == "missing":
        field = owner.model_fields.get(key.rpartition(".")[2])
        text = " ".join((field.description or "").split()) if field is not None else ""
        return key, f"is missing; it is: {text}" if text else "is missing; give it a value"
    if what in ("union_tag_invalid", "union_tag_not_found"):
        given = f"{key}.kind = {context['tag']!r}" if "tag" in context else f"{key}.kind is missing"
        tags = [tag for one in _members(root, key) for tag in _tags(one)]
        return given, f"{meant(context.get('tag'), tags)}expected {' or '.join(map(repr, tags))}"
    if what in ("model_type", "model_attributes_type"):
        return f"{key} = {value!r}", f"expected a table, [{key}]"
    if what == "value_error":
        return key, str(context["error"])
    # A list is what TOML calls a tuple, and what code may give as well.
    message = re.sub(r"\b([Tt])uple\b", lambda match: "List" if match[1] == "T" else "list", fault["msg"])
    words = _words(_annotation(owner, key.rpartition(".")[2])) if what == "literal_error" else ()
    one = what in ("list_type", "tuple_type") and isinstance(value, str)
    hint = f'; one alone is ["{value}"]' if one else meant(value, words, "; {}")
    return f"{key} = {value!r}", message[0].lower() + message[1:] + hint


def _words(annotation: Any) -> Iterator[str]:
    """The words that a field may have, anywhere in its annotation."""
    if get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
    else:
        for argument in get_args(annotation):
            yield from _words(argument)


def _members(root: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """The members of the union at `key`."""
    trees = [root]
    for part in key.split("."):
        trees = [one for tree in trees for one in _trees(_annotation(tree, part))]
    return trees


def _other_kinds(root: type[BaseModel], owner: type[BaseModel], key: str) -> list[str]:
    """The kinds of the same table that know the key, where the one that was chosen does not."""
    table, _, leaf = key.rpartition(".")
    members = _members(root, table) if table and "kind" in owner.model_fields else []
    return [
        repr(tag) for one in members if one is not owner and leaf in one.model_fields for tag in _tags(one)
    ]


def _nearest(root: type[BaseModel], owner: type[BaseModel], key: str) -> str:
    """The known key that an unknown one was probably meant to be, or else all that its table knows."""
    table, _, leaf = key.rpartition(".")
    here = {name: f"{table}.{name}" if table else name for name in owner.model_fields}
    everywhere = list(dict.fromkeys(_all_keys(root)))
    begun = [here[name] for name in here if name.startswith(leaf)]
    likely = [name for name in everywhere if name.rpartition(".")[2] == leaf]
    likely = likely or (begun if len(begun) == 1 else [])
    likely = likely or [here[name] for name in difflib.get_close_matches(leaf, here, n=1)]
    likely = likely or difflib.get_close_matches(leaf, everywhere, n=1, cutoff=0.8)  # optimizer_lr
    return f"did you mean {' or '.join(likely)}?" if likely else f"known are {', '.join(here.values())}"


def _all_keys(tree: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the tree in full, tables after their own name; members of a union may repeat one."""
    for name, field in tree.model_fields.items():
        yield prefix + name
        for below in _trees(field.annotation):
            yield from _all_keys(below, f"{prefix}{name}.")

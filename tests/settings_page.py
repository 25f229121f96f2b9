"""docs/settings.md: every setting of a run, from its field's own docstring.

python -m tests.settings_page    # writes the page again
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.config import GPTSettings, HuggingFaceSettings, MoESettings, Settings, TrainSettings
from stretto.price.cluster import Cluster

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """# Settings of a run

All that a settings file may say, and its default; `stretto train CONFIG optimizer.lr=1e-3` changes one
of them ([training](training.md)). In code, `stretto.Parallel` has the keys of `[parallel]`. At the end are
those of [`stretto.Cluster`](clusters.md), a description in code of machines to plan for.
"""


def page() -> str:
    """The page as it should be."""
    parts = [HEAD, _table("", TrainSettings)]
    for name, field in TrainSettings.model_fields.items():
        one = (field.annotation, *get_args(field.annotation))
        kinds = (GPTSettings, MoESettings, HuggingFaceSettings) if name == "model" else one
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Settings):
                parts.append(_table(name, kind))
    parts.append(_rows("## `stretto.Cluster(...)`", Cluster))
    return "\n".join(parts)


def _table(name: str, of: type[Settings]) -> str:
    """A section for one part of the tree; for the tree itself those of its keys that are no parts."""
    kind = of.model_fields.get("kind")
    head = f"## `[{name}]`" if name else "## At the top"
    if name == "model" and kind is not None:
        head += f', kind = "{get_args(kind.annotation)[0]}"'
    return _rows(head, of)


def _rows(head: str, of: type[BaseModel]) -> str:
    rows = [
        f"| `{key}` | {_default(field)} | {' '.join((field.description or '').split())} |"
        for key, field in of.model_fields.items()
        if not isinstance(field.default, Settings)
    ]
    doc = " ".join((of.__doc__ or "").split("\n\n")[0].split())  # of what code calls, its fields follow
    return "\n".join([head, "", doc, "", "| key | default | what it is |", "| --- | --- | --- |", *rows, ""])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "-"
    value: Any = field.get_default(call_default_factory=True)
    shown = "none" if value is None else f"`{json.dumps(value)}`"
    choices = [one for one in get_args(field.annotation) if isinstance(one, str)]
    if get_origin(field.annotation) is not None and len(choices) > 1:
        shown += ", or " + ", ".join(f"`{json.dumps(one)}`" for one in choices if one != value)
    return shown


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")

"""Tables, timelines and pages: how a predicted or a measured step is shown. Reads results, changes none.

Importing this room teaches `Timeline.save` its file suffixes; what writes them is loaded when it is needed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from stretto.ir.timeline import SAVERS, Saver, Timeline


def _saver(module: str, name: str) -> Saver:
    def save(timeline: Timeline, path: Path) -> None:
        getattr(import_module(f"stretto.report.{module}"), name)(timeline, path)

    return save


SAVERS.update(
    {
        ".perfetto-trace": _saver("perfetto", "save_perfetto"),
        ".svg": _saver("svg", "save_svg"),
        ".json": _saver("files", "save_json"),
    }
)

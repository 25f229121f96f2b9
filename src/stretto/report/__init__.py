"""Tables, timelines and pages: how a predicted or a measured step is shown. Reads results, changes none.

Importing this room teaches `Timeline.save` its file suffixes; what writes them is loaded when it is needed.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

from stretto.ir.timeline import SAVERS, Timeline


def _save(module: str, name: str, timeline: Timeline, path: Path) -> None:
    getattr(import_module(f"stretto.report.{module}"), name)(timeline, path)


SAVERS[".perfetto-trace"] = partial(_save, "perfetto", "save_perfetto")
SAVERS[".svg"] = partial(_save, "svg", "save_svg")
SAVERS[".json"] = partial(_save, "files", "save_json")

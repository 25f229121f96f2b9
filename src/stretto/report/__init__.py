"""Tables, timelines and pages: how a predicted or a measured step is shown. Reads results, changes none.

Importing this room teaches `Timeline.save` its file suffixes, and plans and jobs their pages in notebooks;
what writes them is loaded when it is needed.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.shown import PAGES
from stretto.ir.timeline import SAVERS, Timeline


def _save(module: str, name: str, timeline: Timeline, path: Path) -> None:
    getattr(import_module(f"stretto.report.{module}"), name)(timeline, path)


def _page(name: str, shown: Plan | Job) -> str:
    page: str = getattr(import_module("stretto.report.notebook"), name)(shown)
    return page


PAGES[Plan] = partial(_page, "plan_page")
PAGES[Job] = partial(_page, "job_page")
SAVERS[".perfetto-trace"] = partial(_save, "perfetto", "save_perfetto")
SAVERS[".svg"] = partial(_save, "svg", "save_svg")
SAVERS[".json"] = partial(_save, "files", "save_json")

"""The report as one page that needs no network: findings, timelines to look into, tables, loss and settings.

Tables and words are plain HTML; the timelines are drawn by the scripts under `page/`, which are written into
the page, from data that is packed into it (`stretto.report.pack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from stretto.files.settings_file import flat
from stretto.files.whole_file import write_file
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.report.advice import advice_grid
from stretto.report.findings import findings, stalls_findings, stalls_grid
from stretto.report.grid import Grid, counted, source_word
from stretto.report.load import draw_loss, load_findings, load_grid, loads_table, others_grid
from stretto.report.ops import costliest_ops
from stretto.report.pack import packed
from stretto.report.rundir import Run
from stretto.report.svg import step_line
from stretto.report.tables import (
    comparison_grid,
    costliest_grid,
    ranks_grid,
    rates_grid,
    summary_grid,
    traffic_grid,
)

REPORT = "report.html"
"""The page's name in a run's folder."""

NARROW_COLUMNS = 4
"""Columns of numbers that fit a screen of 390 px."""

SCRIPTS = ("data.js", "look.js", "paint.js", "tip.js", "view.js", "main.js")
"""In the order in which they need each other."""


def render(run: Run) -> str:
    """The page as text. What the run does not have is left out, and listed at the end."""
    name = run.plan.job.name if run.plan else run.path.name
    about = f"{run.path} · {_about(run.plan)}" if run.plan else str(run.path)
    body = [f"<h1>{escape(name)}</h1>", f'<p class="where">{escape(about)}</p>']
    said = "".join(f"<li>{escape(words)}</li>" for words in run_findings(run))
    body.append(f'<ul class="findings">{said}</ul>')
    timelines = run.timelines
    script = ""
    if timelines:
        titles = [source_word(timeline.source).capitalize() for timeline in timelines]
        panels = "".join(map(_panel, timelines, titles))
        body.append(_filled("timelines.html", panels=panels))
        code = "\n".join(map(_page_file, SCRIPTS))
        script = _filled("scripts.html", data=packed(timelines, titles, run.plan), code=code)
    body += _tables(run)
    curve = draw_loss(run.metrics)
    if curve is not None:
        body.append(f'<h2>Loss</h2><div class="scroll">{curve}</div>')
    for title, settings in (("Summary", run.summary), ("Settings", run.settings)):
        if settings:
            rows = [(key, _shown(value)) for key, value in flat(settings)]
            body.append(section(Grid(title, ("", ""), rows, (0, 1))))
    if run.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
        body.append(f'<h2>Left out</h2><ul class="notes">{notes}</ul>')
    title, style = escape(f"Stretto: {run.path.name}"), _page_file("page.css")
    return _filled("page.html", title=title, style=style, body="\n".join(body), script=script)


def write_page(run: Run) -> None:
    """Write the page into the run's folder. Raises OSError."""
    write_file(run.path / REPORT, render(run))


def _about(plan: Plan) -> str:
    """Its schedule, what it runs on, where costs are from."""
    schedule, microbatches = plan.schedule, counted(plan.job.microbatches, "microbatch")
    where = f"{counted(schedule.stages, 'stage')} on {plan.where}"
    return f"{schedule.family}, {where} · {microbatches} · costs: {plan.costs.source}"


def _page_file(name: str) -> str:
    return files("stretto.report").joinpath("page", name).read_text(encoding="utf-8")


def _filled(name: str, **parts: str) -> str:
    return Template(_page_file(name)).substitute(parts)


def _panel(timeline: Timeline, title: str) -> str:
    """Where the scripts draw a timeline."""
    line = step_line(timeline)
    return (
        f'<h3>{escape(title)} <small>{escape(line)}</small></h3><div class="lanes"><canvas tabindex="0" '
        f'role="application" aria-label="{escape(f"{title} timeline: {line}", quote=True)}. Keys: plus and '
        'minus zoom, arrows move, comma and full stop go from span to span." aria-describedby="status">'
        '</canvas><div class="pad"></div></div>'
    )


# --- what a report has, for the page and the terminal --------------------------------------------------


def run_findings(run: Run) -> list[str]:
    """A run's figures in sentences, the most important first."""
    return [
        *findings(run.prediction, run.simulated, run.measured),
        *([] if run.measured is None else stalls_findings(run.measured)),
        *([] if run.observed is None else load_findings(run.observed)),
    ]


def accounts_grid(run: Run) -> Grid | None:
    """Measured against predicted; of a plan what is predicted."""
    if run.prediction is not None and run.measured is not None:
        return comparison_grid(run.prediction, run.measured)
    if run.prediction is not None and run.simulated is not None:
        return summary_grid(run.simulated, run.prediction)
    return None


def run_grids(run: Run, timelines: Sequence[Timeline]) -> list[Grid]:
    """Communication, why it is exposed, speed, who waits for whom, and what the model let see. timelines:
    those whose communication is listed."""
    shown, plan, seen = run.measured or run.simulated, run.plan, run.observed
    grids = [
        traffic_grid(timelines) if timelines else None,
        None if shown is None else advice_grid(shown, plan),
        None if plan is None else rates_grid(plan.work, run.timelines, plan.world, run.summary),
        None if run.measured is None else stalls_grid(run.measured),
        None if seen is None else others_grid(seen),
        None if seen is None else load_grid(seen),
    ]
    return [grid for grid in grids if grid is not None and grid.rows]


# --- the page's tables -------------------------------------------------------------------------------


def _tables(run: Run) -> list[str]:
    accounts = accounts_grid(run)
    left = "" if accounts is None else section(accounts)
    right = "".join(section(ranks_grid(timeline)) for timeline in run.timelines)
    sides = "".join(f"<div>{side}</div>" for side in (left, right) if side)
    body = [f'<div class="pair">{sides}</div>']
    body += [section(grid) for grid in run_grids(run, run.timelines)]
    picture = None if run.observed is None else loads_table(run.observed)
    if picture is not None:
        body.append(f'<div class="scroll">{picture}</div>')
    costliest = [] if run.plan is None else costliest_ops(run.plan)
    if costliest:
        body.append(section(costliest_grid(costliest, reads=True)))
    return body


def section(grid: Grid) -> str:
    """A table with its title and caption. On a phone a wide one has a block a row, and each cell its head."""
    wide = len(grid.head) > NARROW_COLUMNS or any(grid.words[1:])

    def cell(tag: str, at: int, text: str) -> str:
        style = ' class="words"' if at and at in grid.words else ""
        if wide and tag == "td" and grid.head[at]:
            style += f' data-head="{escape(grid.head[at], quote=True)}"'
        # Leading spaces set a row in.
        lead = "&emsp;" * ((len(text) - len(text.lstrip(" "))) // 2)
        return f"<{tag}{style}>{lead}{escape(text.strip())}</{tag}>"

    head = "".join(cell("th", at, text) for at, text in enumerate(grid.head))
    rows = "".join(
        "<tr>" + "".join(cell("td", at, text) for at, text in enumerate(row)) + "</tr>" for row in grid.rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if any(grid.head) else ""
    note = f'<p class="where">{escape(grid.caption)}</p>' if grid.caption else ""
    kind = ' class="wide"' if wide else ""
    table = f'<div class="scroll"><table{kind}>{top}<tbody>{rows}</tbody></table></div>'
    return f"<h2>{escape(grid.title)}</h2>{table}{note}"


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

"""The report as one page that needs no network: summary, tables, timelines, loss curve and settings."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from stretto.report.curve import draw_loss
from stretto.report.rundir import Run
from stretto.report.svg import draw
from stretto.report.tables import Grid, comparison_grid, ranks_grid, summary_grid
from stretto.report.words import format_share, format_us

STYLE = """
:root { color-scheme: light dark; --ink: #1b2330; --quiet: #5d6878; --line: #d8dde4; --ground: #f6f7f9;
  --card: #ffffff; --bad: #c1121f; }
@media (prefers-color-scheme: dark) { :root { --ink: #eef2f7; --quiet: #9aa6b5; --line: #2c3440;
  --ground: #0e1116; --card: #14181f; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1248px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; margin: 0; } h2 { font-size: 18px; margin: 38px 0 12px; }
.where { color: var(--quiet); margin: 2px 0 20px; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.figure b { display: block; font-size: 23px; font-weight: 650; line-height: 1.25; overflow-wrap: anywhere; }
.figure span { color: var(--quiet); font-size: 13px; }
.figure.bad b { color: var(--bad); }
.binds { margin: 14px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); min-width: 60%; }
th, td { padding: 6px 16px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; color: var(--quiet); font-size: 13px; }
td.words { text-align: left; white-space: normal; overflow-wrap: anywhere; }
svg { display: block; max-width: 100%; height: auto; }
ul.notes { color: var(--quiet); padding-left: 20px; }
"""


def render(run: Run) -> str:
    """The page as text. What the run does not have is left out, and listed at the end."""
    body = [f"<h1>{escape(run.plan.job.name if run.plan else run.path.name)}</h1>"]
    body.append(f'<p class="where">{escape(_subtitle(run))}</p>')
    body.append(_figures(run))
    prediction = run.prediction
    if prediction is not None:
        body.append(
            f'<p class="binds">No order of this work can be faster than '
            f"<b>{escape(format_us(prediction.bound_us))}</b>. What binds: {escape(prediction.binds)}.</p>"
        )
    if prediction is not None and run.measured is not None:
        body.append(_section(comparison_grid(prediction, run.measured)))
    elif prediction is not None and run.simulated is not None:
        body.append(_section(summary_grid(run.simulated, prediction)))
    timelines = [t for t in (run.simulated, run.measured) if t is not None]
    if timelines:
        body.append("<h2>Timelines</h2>")
        titles = [
            {"simulated": "Predicted", "measured": "Measured"}.get(t.source, t.source) for t in timelines
        ]
        body.append(f'<div class="scroll">{draw(timelines, titles)}</div>')
        body += [_section(ranks_grid(timeline)) for timeline in timelines]
    curve = draw_loss(run.metrics)
    if curve is not None:
        body.append(f'<h2>Loss</h2><div class="scroll">{curve}</div>')
    for title, data in (("Summary", run.summary), ("Settings", run.settings)):
        if data:
            grid = Grid(title, ("", ""), tuple(_flat(data)))
            body.append(_section(grid, words=True))
    if run.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
        body.append(f'<h2>Left out</h2><ul class="notes">{notes}</ul>')
    title = escape(f"Stretto: {run.path.name}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _subtitle(run: Run) -> str:
    words = [str(run.path)]
    if run.plan is not None:
        schedule = run.plan.schedule
        words.append(f"{schedule.family}, {schedule.stages} stages on {run.plan.ranks} ranks")
        words.append(f"{run.plan.job.microbatches} microbatches")
        words.append(f"costs: {run.plan.costs.source}")
    return " · ".join(words)


def _figures(run: Run) -> str:
    found: list[tuple[str, str, str]] = []
    shown = run.measured or run.simulated
    if shown is not None:
        word = "measured" if run.measured is not None else "predicted"
        exposed_us = sum(shown.exposed_us.values())
        found.append((format_us(shown.step_us), f"step, {word}", ""))
        share = exposed_us / shown.step_us if shown.step_us else 0.0
        bad = "bad" if share >= 0.01 else ""
        found.append((format_share(share), f"of the step is exposed communication, {word}", bad))
    if run.prediction is not None:
        if run.measured is not None:
            found.append((format_us(run.prediction.step_us), "step, predicted", ""))
        found.append((format_us(run.prediction.bound_us), "lower bound of the step", ""))
        found.append((format_share(run.prediction.gap), "predicted gap to the bound", ""))
    losses = [line["loss"] for line in run.metrics if isinstance(line.get("loss"), int | float)]
    if losses:
        found.append((f"{losses[-1]:.4g}", f"loss, from {losses[0]:.4g}", ""))
    speeds = [
        line["tokens_per_s"] for line in run.metrics if isinstance(line.get("tokens_per_s"), int | float)
    ]
    if speeds:
        found.append((f"{sorted(speeds)[len(speeds) // 2]:,.0f}", "tokens per second, median", ""))
    cells = "".join(
        f'<div class="figure {style}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name, style in found
    )
    return f'<div class="figures">{cells}</div>'


def _section(grid: Grid, words: bool = False) -> str:
    style = ' class="words"' if words else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in grid.head)
    rows = "".join(
        f"<tr><td>{escape(first)}</td>"
        + "".join(f"<td{style}>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in grid.rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if any(grid.head) else ""
    return f'<h2>{escape(grid.title)}</h2><div class="scroll"><table>{top}<tbody>{rows}</tbody></table></div>'


def _flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted keys."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", f"{value:.6g}"
        else:
            yield f"{prefix}{key}", "-" if value is None else str(value)

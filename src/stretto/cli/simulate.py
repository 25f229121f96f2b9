"""`stretto simulate`: walk a plan with no device. Thin: everything is done in `simulate` and `report`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.cli.options import Edited
from stretto.cli.outputs import check_output, write_and_tell
from stretto.files.whole_file import saving
from stretto.ir.serialize import load_plan
from stretto.report import save_json, save_perfetto, save_svg
from stretto.report.perfetto import ops_left_out
from stretto.report.tables import ranks_grid, summary_grid
from stretto.simulating import predict
from stretto.simulating import simulate as expected_step
from stretto.verifying import verify

simulate = typer.Typer(add_completion=False)


@simulate.command()
def run(
    plan: Annotated[
        Path, typer.Argument(help="A plan file, as `stretto plan` writes it.", show_default=False)
    ],
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline as a trace for ui.perfetto.dev (.perfetto-trace).")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the timeline into this SVG file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the timeline as JSON.")] = None,
    edited: Edited = False,
) -> None:
    """Walk a plan with no device and say how long it takes, what stays exposed, and how far from the best."""
    for option, path in (("--trace", trace), ("--svg", svg), ("--json", json)):
        check_output(option, path)
    loaded = load_plan(plan, edited=edited)
    verify(loaded)  # what is not proved may be a plan of nothing
    timeline = expected_step(loaded)
    prediction = predict(loaded, timeline)
    wrote: list[str] = []

    def write() -> None:
        for path, save in ((trace, partial(save_perfetto, plan=loaded)), (svg, save_svg), (json, save_json)):
            if path is not None:
                with saving(path):
                    save(timeline, path)
                wrote.append(f"wrote {path}{ops_left_out(timeline, loaded) if path is trace else ''}")

    def tell() -> None:
        console = Console()
        console.print(summary_grid(timeline, prediction).rich())
        console.print(f"What binds the bound: {prediction.binds}.", highlight=False)
        console.print(ranks_grid(timeline).rich())
        for line in wrote:
            console.print(line, highlight=False, soft_wrap=True)

    write_and_tell(write, tell)

"""A mixture of experts beside its dense equal, from the folders of two runs that have ended.

    stretto train examples/moe_text.toml
    stretto train examples/moe_text_dense.toml
    python -m benchmarks moe-text runs/moe_text runs/moe_text_dense --json benchmarks/results/moe_text.json

Both train on the same text in the same order, with as many floating-point operations a token. Held-out losses
are nats a token, without routers' losses; dropped and busiest are of the mixture's last logged steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.report.grid import grid_of
from stretto.report.load import dropped_words, loads_of
from stretto.report.rundir import load_run

LAST_STEPS = 50
"""Over which the training loss is a mean: steps see different text."""


def result_of(folder: Path) -> dict[str, Any]:
    """What a run came to."""
    run = load_run(folder)
    settings, summary = run.settings or {}, run.summary or {}
    result: dict[str, Any] = {"model": settings["model"], "steps": summary["steps"]}
    result["held_out"] = {
        line["step"]: line["held_out_loss"] for line in run.metrics if "held_out_loss" in line
    }
    losses = [line["loss"] for line in run.metrics if "loss" in line]
    result["training_loss"] = statistics.fmean(losses[-LAST_STEPS:])
    result["step_s"] = summary["step_s"]
    if run.observed is not None:
        loads = loads_of(run.observed.end)
        result["busiest"] = max(max(load.shares) * len(load.shares) for load in loads)
        result["dropped"] = dropped_words(run.observed.end)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found = {str(folder.name): result_of(folder) for folder in given.runs}
    steps = sorted({step for result in found.values() for step in result["held_out"]})
    columns: dict[str, Any] = {"run": ("run", "{}")}
    columns |= {f"held out at {step}": (str(step), "{:.4f}") for step in steps}
    columns |= {"training": ("training_loss", "{:.4f}"), "step": ("step_s", "{:.2f} s")}
    rows = [
        {"run": name, **result, **{str(k): v for k, v in result["held_out"].items()}}
        for name, result in found.items()
    ]
    grid_of("Nats a token", columns, rows, absent="-").print()
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")

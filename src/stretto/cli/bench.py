"""`stretto bench NAME`: Stretto against other systems, the cost model against published figures. Thin."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stretto.cli.bench_compute import compute
from stretto.cli.bench_reshard import reshard
from stretto.cli.figures import JsonOut, KeepOut, check_json, make_folder, write_json
from stretto.errors import StrettoError, UsageError
from stretto.ir.program import OVERLAP_MODES

NOISY = 1.15
"""Slowest over fastest round of one system from which the race calls itself disturbed. Measured on a quiet
machine of 2 cores: 1.03 to 1.08."""

bench = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Race other systems; check the cost model."
)


bench.command()(compute)
bench.command()(reshard)


@bench.callback()
def _bench() -> None:
    """Race Stretto against other systems, and its cost model against published figures."""


@bench.command()
def pipeline(
    rate: Annotated[str, typer.Option(help="Rate of the link: 100mbit, 1gbit, unlimited.")] = "100mbit",
    rounds: Annotated[int, typer.Option(help="Counted rounds; every system takes one turn in each.")] = 7,
    json_out: JsonOut = None,
) -> None:
    """PyTorch's pipelining against every family of ours: 2 ranks, 4 blocks of hidden 512 a stage."""
    from stretto.bench.in_lab import result_of
    from stretto.bench.pipeline import Setup
    from stretto.lab import Lab

    if rounds < 5:
        raise UsageError(f"--rounds {rounds}: a median on a noisy machine wants 5 rounds or more")
    check_json(json_out)
    setup = Setup(rate=rate, rounds=rounds)
    lab = Lab(hosts=setup.ranks, rate=rate)
    result = result_of(lab, "stretto.bench.pipeline", asdict(setup))
    _print(result)
    write_json(result, json_out)


@bench.command()
def tensor(
    rate: Annotated[
        str,
        typer.Option(
            help="Rates of the network, with commas between: 50mbit, unlimited; `balanced` is where "
            "communication takes about as long as compute."
        ),
    ] = "balanced",
    hidden: Annotated[str, typer.Option(help="Hidden sizes of the GPTs: 1024, 2048.")] = "1024,2048",
    pp: Annotated[str, typer.Option(help="Pipeline stages: 1, 2.")] = "1,2",
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Share the sequence between matrices too.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Counted rounds; every system takes one turn in each.")] = 5,
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """PyTorch's eager tensor parallelism against ours, with overlap off, local and window: tp = 2."""
    from stretto.bench.tensor_race import BALANCED, SHAPES, races, run_races
    from stretto.cli.bench_tensor import print_race
    from stretto.lab.rates import parse_rate

    if rounds < 3:
        raise UsageError(f"--rounds {rounds}: a median on a noisy machine wants 3 rounds or more")
    check_json(json_out)
    rates = [word.strip() for word in rate.split(",")]
    for word in rates:
        if word != BALANCED:
            parse_rate(word)  # before the first lab is up
    setups = races(
        rates,
        _numbers("--hidden", hidden, tuple(SHAPES)),
        _numbers("--pp", pp, (1, 2)),
        sequence_parallel=sequence_parallel,
        rounds=rounds,
    )

    def keep(result: dict[str, Any]) -> None:
        print_race(result["races"][-1])
        write_json(result, json_out)

    folder = make_folder(keep_out) if keep_out is not None else None
    run_races(setups, Console(stderr=True).print, keep, folder)


def _numbers(option: str, text: str, known: tuple[int, ...]) -> list[int]:
    """Numbers with commas between, of those that are known."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if word not in map(str, known)]
    if wrong:
        raise UsageError(f"{option} {text}: {wrong[0]!r} is none of {', '.join(map(str, known))}")
    return [int(word) for word in words]


@bench.command()
def predict(
    rounds: Annotated[int, typer.Option(help="Rounds of each cell: ops measured, then steps.")] = 3,
    rates: Annotated[str, typer.Option(help="Rates of the network, with commas between.")] = "",
    overlap: Annotated[str, typer.Option(help="off, local or window, as in a plan.")] = "window",
    pp: Annotated[str, typer.Option(help="1, 2 or both, with a comma between.")] = "1,2",
    tp: Annotated[str, typer.Option(help="1, 2 or both, with a comma between.")] = "1,2",
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """Predicted against measured: GPTs of several shapes, pp and tp of 1 and 2, rates of the network."""
    from stretto.bench.predict import RATES, SHAPES, grid
    from stretto.bench.predict_grid import bits_per_s, run_grid

    if rounds < 3:
        raise UsageError(f"--rounds {rounds}: a median on a noisy machine wants 3 rounds or more")
    check_json(json_out)
    chosen = tuple(rate.strip() for rate in rates.split(",")) if rates else RATES
    for rate in chosen:
        bits_per_s(rate)  # before the first lab is up
    if overlap not in OVERLAP_MODES:
        raise UsageError(f"--overlap {overlap}: choose one of {', '.join(OVERLAP_MODES)}")
    layouts = _numbers("--pp", pp, (1, 2)), _numbers("--tp", tp, (1, 2))
    cells = [
        cell for cell in grid(SHAPES, chosen, overlap) if cell.pp in layouts[0] and cell.tp in layouts[1]
    ]
    progress = Console(stderr=True)

    def keep(so_far: dict[str, Any]) -> None:
        try:
            write_json(so_far, json_out)
        except StrettoError as error:  # the table at the end needs no disk
            progress.print(f"{error}; the run goes on", highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = make_folder(keep_out) if keep_out is not None else Path(temporary)
        result = run_grid(cells, rounds, folder.resolve(), progress.print, keep)
    table = Table()
    for name in (
        "cell",
        "measured ms",
        "predicted",
        "planned",
        "from others",
        "exposed %",
        "predicted",
        "peak",
    ):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for row in result["rows"]:
        other = row.get("transferred_error_pct")
        table.add_row(
            row["cell"],
            f"{row['measured_ms']:.0f}",
            f"{row['error_pct']:+.1f} %",
            f"{100 * (row['planned_ms'] / row['measured_ms'] - 1):+.1f} %",
            "" if other is None else f"{other:+.1f} %",
            f"{row['exposed_measured_pct']:.1f}",
            f"{row['exposed_predicted_pct']:.1f}",
            f"{row['peak_error_pct']:+.1f} %",
        )
    console = Console(width=110)
    console.print(table)
    for name, value in result["summary"].items():
        console.print(f"  {name.replace('_', ' '):40}{value:8.1f}", highlight=False)
    write_json(result, json_out)


@bench.command()
def published(
    json_out: JsonOut = None,
) -> None:
    """The cost model against published figures: collectives, training steps, printed rates."""
    from stretto.bench.published import published as compare

    check_json(json_out)
    result = compare()
    table = Table()
    table.add_column("figure")
    table.add_column("value", justify="right")
    for part, figures in result.items():
        for name, value in figures.items():
            table.add_row(f"{part}: {name.replace('_', ' ')}", _value(value))
        table.add_section()
    Console(width=110).print(table)
    write_json(result, json_out)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    return str(value)


def _print(result: dict[str, object]) -> None:
    setup, rows = result["setup"], result["rows"]
    assert isinstance(setup, dict)
    assert isinstance(rows, list)
    table = Table(
        title=f"{setup['rate']}, {setup['microbatches']} microbatches, medians of {setup['rounds']} rounds",
        caption=f"lower bound {setup['bound_s']:.3f} s: {setup['binds']}",
    )
    for column in ("system", "step s", "vs torch 1f1b", "vs bound", "exposed s", "predicted s", "error"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        predicted, exposed = row["predicted_s"], row["exposed_s"]
        table.add_row(
            row["system"],
            f"{row['step_s']:.3f}",
            f"{row['speedup_vs_torch_1f1b']:.3f}",
            f"{row['ratio_to_bound']:.3f}",
            "" if exposed is None else f"{exposed:.3f}",
            "" if predicted is None else f"{predicted:.3f}",
            "" if predicted is None else f"{100 * (predicted / row['step_s'] - 1):+.1f} %",
        )
    Console(width=110).print(table)
    noisy = [r["system"] for r in rows if max(r["rounds_s"]) > NOISY * min(r["rounds_s"])]
    if noisy:
        Console(width=110, stderr=True).print(
            f"The rounds of {', '.join(noisy)} spread by more than {100 * (NOISY - 1):.0f} %: something else "
            "was running. Quote nothing of this; run again on a quiet machine."
        )

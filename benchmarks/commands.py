"""The commands of `python -m benchmarks`: options in, one call, a table out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import tables
from stretto.cli.common import check_output, write_and_print
from stretto.cli.main import StoppableGroup
from stretto.errors import StrettoError, UsageError, meant
from stretto.files.whole_file import saving, write_file
from stretto.ir.program import OVERLAP_MODES
from stretto.report.grid import Grid, Row

bench = typer.Typer(cls=StoppableGroup, add_completion=False, no_args_is_help=True)
progress = Console(stderr=True)

Rounds = Annotated[int, typer.Option(help="Counted rounds; every system takes one turn in each.")]
RatesOfRaces = Annotated[
    str,
    typer.Option(
        help="Rates of the network, with commas between: 50mbit, unlimited; `balanced` is where "
        "communication takes about as long as compute."
    ),
]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
KeepOut = Annotated[
    Path | None,
    typer.Option(
        "--keep", help="Keep plans and measured steps in this folder, each as a run that `report` can show."
    ),
]


@bench.callback()
def _bench() -> None:
    """Race Stretto against other systems, and check its plans and its cost model."""


@bench.command()
def compute(
    models: Annotated[str, typer.Option(help="Models, with commas between; all by default.")] = "",
    threads: Annotated[str, typer.Option(help="Numbers of threads, with commas between.")] = "1,2",
    rounds: Rounds = 9,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Race the compiled systems too (Inductor).")
    ] = True,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens of a microbatch.")] = 256,
    json_out: JsonOut = None,
) -> None:
    """Our window functions against eager PyTorch and torch.compile: one rank, no communication."""
    from benchmarks.compute import MODELS
    from benchmarks.compute import compute as race

    _begin(rounds, 5, json_out)
    counts = _words(threads)
    if not counts or not all(word.isdecimal() and int(word) for word in counts):
        raise UsageError(f"--threads {threads}: give numbers from 1 on, with commas between")
    names = _words(models) or list(MODELS)
    with tempfile.TemporaryDirectory() as folder:
        result = race(
            names,
            list(map(int, counts)),
            rounds,
            Path(folder),
            compile=compiled,
            sequence=sequence,
            say=progress.print,
        )
    _write_and_print(result, json_out, tables.compute_table(result))


@bench.command()
def reshard(
    rate: Annotated[str, typer.Option(help="Rate of each host's link: 200mbit.")] = "200mbit",
    mib: Annotated[int, typer.Option(min=1, help="Size of the tensor.")] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds; every case takes one turn in each.")] = 3,
    parts: Annotated[
        str, typer.Option("--cases", help="fan-out, devices, layouts, meshes.")
    ] = "fan-out,devices,layouts",
    in_flight_mib: Annotated[
        int, typer.Option(min=1, help="What a rank may have under way before it waits.")
    ] = 4,
    json_out: JsonOut = None,
) -> None:
    """A tensor from one or two of four hosts to others: measured makespan against the plan and the bound.

    Each host has two ranks.
    """
    from benchmarks.labs import result_of
    from benchmarks.reshard import HOSTS, RANKS_PER_HOST, ReshardRace, cases, link_bytes_per_s
    from stretto.lab import Lab

    _begin(rounds, 3, json_out)
    link_bytes_per_s(rate)  # before the lab is up
    chosen = tuple(_words(parts))
    cases(chosen)
    setup = ReshardRace(rate, mib, rounds, chosen, in_flight_mib << 20)
    lab = Lab(hosts=HOSTS, rate=rate, ranks_per_host=RANKS_PER_HOST)
    result = result_of(lab, "reshard", asdict(setup))
    _write_and_print(result, json_out, tables.reshard_table(result))


@bench.command()
def pipeline(
    rate: Annotated[str, typer.Option(help="Rate of the links: 100mbit, 1gbit, unlimited.")] = "100mbit",
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, with a comma between: 2, 4.")] = "2",
    families: Annotated[
        str,
        typer.Option(help="Families of ours that race, or auto, with commas between; `all` is all of them."),
    ] = "all",
    rounds: Rounds = 7,
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """PyTorch's pipelining against families of ours: 8 blocks of hidden 512, one or two stages a rank."""
    from benchmarks.pipeline import HOSTS, WORKER, chosen, races
    from stretto.lab.network import parse_rate

    _begin(rounds, 5, json_out)
    parse_rate(rate)  # before the first lab is up
    setups = races(rate, _numbers("--hosts", hosts, HOSTS), chosen(_words(families)), rounds=rounds)

    _run(WORKER, setups, tables.pipeline_table, json_out, keep_out)


@bench.command()
def tensor(
    rate: RatesOfRaces = "balanced",
    hidden: Annotated[str, typer.Option(help="Hidden sizes of the GPTs: 1024, 2048.")] = "1024,2048",
    pp: Annotated[str, typer.Option(help="Pipeline stages: 1, 2.")] = "1,2",
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Share the sequence between matrices too.")
    ] = False,
    rounds: Rounds = 5,
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """PyTorch's eager tensor parallelism against ours, with overlap off, local and window: tp = 2."""
    from benchmarks.tensor import SHAPES, WORKER, races

    _begin(rounds, 3, json_out)
    setups = races(
        _rates(rate),
        _numbers("--hidden", hidden, SHAPES),
        _numbers("--pp", pp, (1, 2)),
        sequence_parallel=sequence_parallel,
        rounds=rounds,
    )

    _run(WORKER, setups, tables.tensor_table, json_out, keep_out)


@bench.command()
def moe(
    rate: RatesOfRaces = "balanced",
    hosts: Annotated[str, typer.Option(help="Hosts that share the experts, a rank on each: 2, 4.")] = "2",
    routing: Annotated[
        str,
        typer.Option(
            help="Who sends tokens: `balanced`, to all experts the same number; `router`, the model's own."
        ),
    ] = "balanced,router",
    rounds: Rounds = 3,
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """What hides the all-to-alls of experts: serial, under experts alone, AMPipe, pipe-experts, windows."""
    from benchmarks.moe import SHAPES, VERSION, WORKER, races
    from benchmarks.moe_model import ROUTINGS

    _begin(rounds, 3, json_out)
    rates = _rates(rate)
    chosen = _words(routing)
    if not chosen or any(word not in ROUTINGS for word in chosen):
        raise UsageError(f"--routing {routing}: choose of {', '.join(ROUTINGS)}, with commas between")
    routings = [known for word in chosen for known in ROUTINGS if known == word]
    setups = races(rates, _numbers("--hosts", hosts, SHAPES), routings, rounds=rounds)

    _run(WORKER, setups, tables.moe_table, json_out, keep_out, {"version": VERSION})


@bench.command()
def context(
    rate: RatesOfRaces = "balanced",
    hosts: Annotated[str, typer.Option(help="Hosts that share a sequence, a rank on each: 2, 4.")] = "2,4",
    rounds: Rounds = 3,
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """A long sequence that ranks share: a ring waited for and hidden, gathered, Ulysses, PyTorch's own."""
    from benchmarks.context import SHAPES, VERSION, WORKER, races

    _begin(rounds, 3, json_out)
    setups = races(_rates(rate), _numbers("--hosts", hosts, SHAPES), rounds=rounds)

    _run(WORKER, setups, tables.context_table, json_out, keep_out, {"version": VERSION})


@bench.command()
def dp(
    rate: RatesOfRaces = "balanced",
    hosts: Annotated[str, typer.Option(help="Hosts that share the batch, a rank on each: 2, 4.")] = "2,4",
    zero: Annotated[
        str, typer.Option(help="What ranks of ours share: 0, 1 and 3, with commas between.")
    ] = "0,1,3",
    rounds: Rounds = 3,
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """Data parallelism with parameters, states or nothing sharded, against PyTorch's fully_shard and DDP."""
    from benchmarks.dp import LEVELS, SHAPES, VERSION, WORKER, races

    _begin(rounds, 3, json_out)
    levels = _numbers("--zero", zero, LEVELS)
    setups = races(_rates(rate), _numbers("--hosts", hosts, SHAPES), levels, rounds=rounds)

    _run(WORKER, setups, tables.dp_table, json_out, keep_out, {"version": VERSION})


@bench.command()
def unet(
    rate: Annotated[
        str,
        typer.Option(
            help="Rates of the network, with commas between: 50mbit, unlimited; `balanced` is where what a "
            "microbatch sends takes as long as a forward."
        ),
    ] = "balanced",
    rounds: Rounds = 5,
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """A U-Net whose skips cross two hosts: messages waited for, early, and PyTorch's pipelining."""
    from benchmarks.unet import VERSION, WORKER, UNetRace, check_installed

    _begin(rounds, 3, json_out)
    setups = [UNetRace(rate=one, rounds=rounds) for one in _rates(rate)]
    check_installed()

    _run(WORKER, setups, tables.unet_table, json_out, keep_out, {"version": VERSION})


@bench.command()
def predict(
    rounds: Annotated[int, typer.Option(help="Rounds of steps in each cell.")] = 3,
    rates: Annotated[str, typer.Option(help="Rates of the network, with commas between.")] = "",
    overlap: Annotated[str, typer.Option(help="off, local or window, as in a plan.")] = "window",
    pp: Annotated[str, typer.Option(help="1, 2 or both, with a comma between.")] = "1,2",
    tp: Annotated[str, typer.Option(help="1, 2 or both, with a comma between.")] = "1,2",
    json_out: JsonOut = None,
    keep_out: KeepOut = None,
) -> None:
    """Measured against predicted: GPTs of several shapes, pp and tp of 1 and 2, rates of the network."""
    from benchmarks.predict import RATES, grid, run_grid
    from stretto.lab.network import parse_rate

    _begin(rounds, 3, json_out)
    chosen = tuple(_words(rates)) or RATES
    for rate in chosen:
        parse_rate(rate)  # before the first lab is up
    if overlap not in OVERLAP_MODES:
        raise UsageError(
            f"--overlap {overlap}: {meant(overlap, OVERLAP_MODES)}choose one of {', '.join(OVERLAP_MODES)}"
        )
    layouts = _numbers("--pp", pp, (1, 2)), _numbers("--tp", tp, (1, 2))
    cells = [cell for cell in grid(chosen, overlap) if cell.pp in layouts[0] and cell.tp in layouts[1]]

    def keep(so_far: dict[str, Any]) -> None:
        try:
            write_json(so_far, json_out)
        except StrettoError as error:  # the table at the end needs no disk
            progress.print(f"{error}; the run goes on", highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = _folder(keep_out) or Path(temporary)
        result = run_grid(cells, rounds, folder.resolve(), progress.print, keep)
    _write_and_print(result, json_out, tables.predict_table(result))


@bench.command()
def published(
    json_out: JsonOut = None,
) -> None:
    """The cost model against published figures: collectives, training steps, printed rates."""
    from benchmarks.published import published as compare

    check_output("--json", json_out)
    result = compare()
    _write_and_print(result, json_out, tables.published_table(result))


SCRIPTS = {
    "accelerator": "A step on one accelerator: op by op, compiled, replayed; and what was predicted of it.",
    "attention-kernel": "A Llama captured as it is, and with its mask written out.",
    "braid": "Tensor-parallel all-reduces of a pipeline that hide, beside STP's braid.",
    "chunks-described": "Dense blocks in chunks on 8 H100, predicted from the catalogue.",
    "context-described": "Long sequences that H100s share, predicted from the catalogue.",
    "fit-steps": "Fit the factors of a training step that no sheet says.",
    "grid": "What plans of 36 jobs promise and what planning takes, before and after a change.",
    "llama-described": "Llama 3 405B on 16,384 H100, predicted from the catalogue, beside Meta's.",
    "moe-described": "Experts on 16 H100, predicted from the catalogue.",
    "moe-text": "A mixture of experts beside its dense equal, from the folders of two runs.",
    "zero-described": "Sharded state on H100, predicted from the catalogue.",
}
"""Benchmarks whose module reads its own arguments."""


def _add_script(name: str, text: str) -> None:
    def run(context: typer.Context) -> None:
        raise typer.Exit(import_module(f"benchmarks.{name.replace('-', '_')}").main(context.args) or 0)

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    bench.command(name, help=text, context_settings=settings)(run)


for _name, _text in SCRIPTS.items():
    _add_script(_name, _text)


def _run(
    module: str,
    setups: Sequence[Any],
    table: Callable[[Row], Grid],
    json_out: Path | None,
    keep_out: Path | None,
    more: Row | None = None,
) -> None:
    """Run races; after each its table is printed and all so far are written, with `more`."""
    from benchmarks.labs import run_races

    def keep(result: Row) -> None:
        last = result["races"][-1]
        _write_and_print({**(more or {}), **result}, json_out, table(last), last["rows"])

    run_races(module, setups, progress.print, keep, _folder(keep_out))


def _begin(rounds: int, least: int, json_out: Path | None) -> None:
    """What is looked at before any work."""
    if rounds < least:
        raise UsageError(f"--rounds {rounds}: a median on a noisy machine wants {least} rounds or more")
    check_output("--json", json_out)


def _rates(text: str) -> list[str]:
    """Rates of races, looked at before the first lab is up."""
    from benchmarks.labs import BALANCED
    from stretto.lab.network import parse_rate

    result = _words(text)
    if not result:
        raise UsageError(f"--rate {text!r}: give rates, as 100mbit, or {BALANCED}, with commas between")
    for word in result:
        if word != BALANCED:
            parse_rate(word)
    return result


def _words(text: str) -> list[str]:
    """Words with commas between."""
    return [word.strip() for word in text.split(",")] if text else []


def _numbers(option: str, text: str, known: Iterable[int]) -> list[int]:
    """Numbers with commas between, of those that are known."""
    allowed = list(map(str, known))
    for word in _words(text) or [""]:
        if word not in allowed:
            raise UsageError(f"{option} {text}: {word!r} is none of {', '.join(allowed)}")
    return [int(word) for word in _words(text)]


def _folder(out: Path | None) -> Path | None:
    """The folder that `--keep` names, made if it is not there. Raises UsageError when it cannot be."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep {out}: the folder cannot be made: {error.strerror}") from None
    return out


def write_json(result: Any, out: Path | None) -> None:
    """Write the figures, if they are wanted. Raises StrettoError when that fails."""
    if out is not None:
        with saving(out):
            write_file(out, json.dumps(result, indent=1) + "\n")
        progress.print(f"wrote {out}")


def _write_and_print(result: Any, out: Path | None, table: Grid, rows: Sequence[Row] = ()) -> None:
    """The figures, as a file and as a table; rows: where noise is looked for."""

    def show() -> None:
        table.print()
        tables.warn_of_noise(rows)

    write_and_print([(out, lambda path: write_file(path, json.dumps(result, indent=1) + "\n"))], show)

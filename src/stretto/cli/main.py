"""`stretto`: the command line's entry. Each command lives in its own file and is added here.

Commands are imported when they are called, so that a schedule can be printed without loading a model
library. Errors that a user can mend end with one message and status 1 or 2, never with a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any, TextIO, cast

import typer
from typer.core import TyperGroup

from stretto.errors import StrettoError

COMMANDS = {
    # name: (module, attribute, one line of help)
    "train": ("stretto.cli.train", "train", "Train a model as a settings file says."),
    "plan": ("stretto.cli.plan", "plan", "Plan a training step and save the plan."),
    "check": ("stretto.cli.check", "check", "Compare one step with the plain model's, in this process."),
    "verify": ("stretto.cli.verify", "verify", "Prove a plan or a schedule free of faults."),
    "simulate": ("stretto.cli.simulate", "simulate", "Walk a plan with no device and say how long it takes."),
    "rehearse": (
        "stretto.cli.rehearse",
        "rehearse",
        "Run one rank of a plan alone, its communication emulated.",
    ),
    "schedule": ("stretto.cli.schedule", "schedule", "Print, draw or time a schedule."),
    "calibrate": (
        "stretto.cli.calibrate",
        "calibrate",
        "Measure this machine or cluster for later planning.",
    ),
    "cost": ("stretto.cli.cost", "cost", "List a plan's costliest ops and collectives."),
    "cluster": ("stretto.cli.cluster", "cluster", "List and show clusters that can be planned for."),
    "reshard": ("stretto.cli.reshard", "reshard", "Plan how a tensor goes from one mesh to another."),
    "lab": ("stretto.cli.lab", "lab", "Emulate a slow cluster on this machine."),
    "bench": ("stretto.cli.bench", "bench", "Race Stretto against other systems."),
    "show": ("stretto.cli.show", "show", "List the ops of one phase of one stage of a plan."),
    "report": ("stretto.cli.report", "report", "Show a finished run: predicted against measured."),
    "export": ("stretto.cli.export", "export", "Write a checkpoint as safetensors."),
}


class LazyGroup(TyperGroup):
    """Loads a command's module only when that command is asked for.

    typer carries its own copy of click, so the group must be typer's: classes of click itself do not fit.
    """

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        found: Any = getattr(import_module(module), attribute)
        command = typer.main.get_command(found) if isinstance(found, typer.Typer) else found
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # The listing must not import every command's module, so it is written from the table.
        wide = max(map(len, COMMANDS))
        typer.echo("Usage: stretto [--version] COMMAND [ARGS]...\n\nCommands:")
        for name, (_, _, text) in COMMANDS.items():
            typer.echo(f"  {name.ljust(wide)}  {text}")


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
    if version:
        typer.echo(f"stretto {metadata.version('stretto')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the process ends with status 0, 1 (failed or refused) or 2 (wrong usage)."""
    status: Any = 0
    stdout = sys.stdout
    if stdout is not None:  # it is None where the process began with it closed
        sys.stdout = cast(TextIO, Told(stdout))
    try:
        try:
            # standalone: typer itself shows wrong usage and ends with 2
            typer.main.get_command(app)(prog_name="stretto")
        except SystemExit as end:
            status = end.code
        # Here and not at the interpreter's end, where a failure could only show as a traceback.
        if sys.stdout is not None:
            sys.stdout.flush()
    except StrettoError as error:
        print(f"stretto: {error}", file=sys.stderr)
        status = error.exit_status
    except BrokenPipeError:  # a reader that has seen enough, as `head`, is no failure
        status = status or 1
    finally:
        sys.stdout = stdout
        _drop(stdout)
    sys.exit(status)


class Told:
    """A stream whose failed writes are errors that `main` prints in one line. Whoever writes to a stream by
    itself, as tables do, says not which one has failed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _told():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with _told():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with _told():
            self._stream.flush()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StrettoError(f"cannot write to standard output: {error.strerror}") from None


def _drop(stream: TextIO | None) -> None:
    """Let go what a stream's buffer still holds and cannot write, else the interpreter's end complains."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()

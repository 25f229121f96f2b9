"""`stretto`: the command line's entry. Each command lives in its own file and is added here.

Commands are imported when they are called, so that a schedule can be printed without loading a model
library. Errors that a user can mend end with one message and status 1 or 2, never with a traceback.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click
import typer

from stretto.errors import StrettoError

COMMANDS = {
    # name: (module, attribute, one line of help)
    "train": ("stretto.cli.train", "train", "Train a model as a settings file says."),
    "plan": ("stretto.cli.plan", "plan", "Plan a training step and save the plan."),
    "verify": ("stretto.cli.verify", "verify", "Prove a plan or a schedule free of faults."),
    "simulate": ("stretto.cli.simulate", "simulate", "Walk a plan with no device and say how long it takes."),
    "schedule": ("stretto.cli.schedule", "schedule", "Print, draw or time a schedule."),
    "lab": ("stretto.cli.lab", "lab", "Emulate a slow cluster on this machine."),
    "bench": ("stretto.cli.bench", "bench", "Race Stretto against other systems."),
    "report": ("stretto.cli.report", "report", "Show a finished run: predicted against measured."),
    "export": ("stretto.cli.export", "export", "Write a checkpoint as safetensors."),
}


class LazyGroup(click.Group):
    """Loads a command's module only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        found: Any = getattr(import_module(module), attribute)
        command = typer.main.get_command(found) if isinstance(found, typer.Typer) else found
        assert isinstance(command, click.Command)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, help=__doc__.split("\n")[0] if __doc__ else None)
@click.version_option(package_name="stretto")
def cli() -> None:
    pass


def main() -> None:
    """Run the command line; the process ends with status 0, 1 (failed or refused) or 2 (wrong usage)."""
    try:
        code = cli(standalone_mode=False)
    except click.exceptions.Abort:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except StrettoError as error:
        print(f"stretto: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    sys.exit(code if isinstance(code, int) else 0)

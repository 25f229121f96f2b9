"""`stretto`: the command line's entry. Each command lives in its own file and is added here.

Commands are imported when they are called, so that a schedule can be printed without loading a model
library. Errors that a user can mend end with one message and status 1 or 2, never with a traceback.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from importlib import import_module
from typing import Any, TextIO

import typer
from typer.core import TyperCommand

from stretto import __version__
from stretto.cli.common import NamedGroup, printable
from stretto.errors import StoppedError, StrettoError
from stretto.train.failure import is_launched
from stretto.train.interrupt import Stops

COMMANDS = {
    "init": "Write an example's settings file; list the examples.",
    "settings": "Print what a settings file may say.",
    "train": "Train a model as a settings file describes.",
    "plan": "Plan a training step and save the plan.",
    "tune": "Choose layout and schedule for a cluster, and write the settings.",
    "check": "Compare one step with the plain model's, in this process.",
    "verify": "Prove a plan or a schedule free of faults.",
    "simulate": "Walk a plan with no device: how long it takes.",
    "rehearse": "Run one rank of a plan alone, its communication emulated.",
    "schedule": "Print, draw or time a schedule.",
    "calibrate": "Measure this machine or cluster for later planning.",
    "cost": "List a plan's costliest ops and collectives.",
    "cluster": "List and show clusters that can be planned for.",
    "reshard": "Plan how a tensor goes from one mesh to another.",
    "lab": "Emulate a slow cluster on this machine.",
    "show": "List the ops of one phase of one stage of a plan.",
    "report": "Show a finished run: measured against predicted.",
    "convert": "Make settings of a Megatron-LM command line.",
    "export": "Write a checkpoint as safetensors.",
}
"""Name -> one line of help. The command is the program of this name in the module of this name, or in that
of `MODULES`."""

MODULES = {
    **dict.fromkeys(("simulate", "rehearse", "verify"), "walks"),
    **dict.fromkeys(("show", "cost"), "report"),
    **dict.fromkeys(("check", "export"), "train"),
    "init": "settings",
}


class StoppableGroup(NamedGroup):
    """Commands whose output fits every terminal, and which end on each signal as on Ctrl-C.

    typer carries its own copy of click, so the group must be typer's: classes of click itself do not fit.
    """

    def main(self, *given: Any, **named: Any) -> Any:
        with printable():
            return super().main(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        if is_launched():  # its launcher ends a rank, which then prints nothing, at once
            return super().invoke(ctx)
        with Stops() as stops:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:  # of commands that have nothing to add; typer would end without a word
                raise StoppedError("interrupted", stops.status) from None
            except Exception as error:
                if not stops.numbers or isinstance(error, (StrettoError, typer.Exit)):
                    raise
                # Of a library that swallowed the interrupt while it was loaded, and is incomplete.
                raise StoppedError("interrupted", stops.status) from None


class LazyGroup(StoppableGroup):
    """Loads a command's module only when that command is asked for."""

    names_only = False
    """Whether names alone are asked for, as where a shell completes one."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self.names_only = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.names_only = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self.names_only:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        module = import_module(f"stretto.cli.{MODULES.get(cmd_name, cmd_name)}")
        command: Any = typer.main.get_command(getattr(module, cmd_name))
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # The list must not import every command's module, so it is written from the table.
        wide = max(map(len, COMMANDS))
        typer.echo("Usage: stretto [--version] COMMAND [ARGS]...\n\nCommands:")
        for name, text in COMMANDS.items():
            typer.echo(f"  {name.ljust(wide)}  {text}")
        typer.echo("\n`stretto --install-completion` lets the shell complete commands and options.")


app = typer.Typer(cls=LazyGroup, no_args_is_help=True)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
    if version:
        typer.echo(f"stretto {__version__}")
        raise typer.Exit


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a failed write of standard output may be. Files that commands write name themselves."""


def main(program: typer.Typer = app, name: str = "stretto") -> None:
    """Run the command line, or another program of such commands. The process ends with status 0, 1 (failed
    or refused), 2 (wrong usage), 130 (Ctrl-C) or 143 (SIGTERM)."""
    # The process ends: what the interpreter would collect, some seconds long, the system takes back anyway.
    atexit.register(gc.freeze)
    status: Any = 0
    try:
        try:
            # standalone: typer itself shows wrong usage and ends with 2
            typer.main.get_command(program)(prog_name=name)
        except SystemExit as end:
            if _of_user(end) is not None:
                raise
            status = end.code
        # Here and not at the interpreter's end, where a failure could only show as a traceback.
        if sys.stdout is not None:  # it is None where the process began with it closed
            sys.stdout.flush()
    except StoppedError as error:
        status = _stopped(error)
    except KeyboardInterrupt:  # before the command, or after it
        status = _stopped(StoppedError("interrupted"))
    except StrettoError as error:
        print(f"stretto: {error}", file=sys.stderr)
        status = error.exit_status
    except (Exception, SystemExit) as error:
        status = _ended(error, status)
    finally:
        _drop(sys.stdout)
    sys.exit(status)


def _stopped(error: StoppedError) -> int:
    """The status of what the user stopped, with its message. A rank that is not yet one of the run's prints
    nothing: Ctrl-C reaches all of them, and their launcher has one message."""
    if not is_launched():
        print(f"stretto: {error}", file=sys.stderr)
    return error.exit_status


def _ended(error: Exception | SystemExit, status: Any) -> Any:
    """The status for what the user cannot mend in the settings; raises what no one foresaw."""
    message = _of_user(error)
    if message is not None:
        print(f"stretto: {message}", file=sys.stderr)
        return 1
    if isinstance(error, BrokenPipeError):  # a reader that has seen enough, as `head`, is no failure
        return status or 1
    if not isinstance(error, OSError) or error.errno not in DISK or error.filename is not None:
        raise error
    print(f"stretto: cannot write to standard output: {error.strerror}", file=sys.stderr)
    return 1


def _of_user(error: Exception | SystemExit) -> str | None:
    """The message of an error of a task's own code, if a task was read at all."""
    task = sys.modules.get("stretto.train.task")
    return None if task is None else task.of_user(error)


def _drop(stream: TextIO | None) -> None:
    """Let go what a stream's buffer still has and cannot write, else the interpreter's end complains."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()

"""What a run trains: its data, its model and loss, and its report at the end. Text is one kind of task.

A task of one's own is a file of Python that `task.file` names, with a function `task(config, seed) -> Task`.
Every rank calls it, and so does the launcher: it must give the same each time. The room reads that file and
runs it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb, format_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from stretto.batch.loss import Loss
from stretto.config import TrainSettings
from stretto.config.task import TaskSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.near import near_path
from stretto.files.say import Say
from stretto.ir.stage_maps import is_own
from stretto.schedule.csv import read_csv

if TYPE_CHECKING:
    from stretto.runtime import Runner  # which a launcher does without

FUNCTION = "task"
"""What the file of a task defines."""
MODULE = "stretto_task_"
"""How the modules of such files are called: this and the file's name."""
KEPT = "task.sha256"
"""What a checkpoint keeps of a task of one's own: its digest."""

Batches = Callable[[int, int], Any]
"""(step, global_batch) -> the batch of a step: a tree of tensors whose first dim is `global_batch`. It must
follow from the two alone, noise included, so that a resumed run goes on with the same."""

Report = Callable[[nn.Module, Path, Say], Mapping[str, Any]]
"""(model, folder, say) -> what the run's summary is to have beside its own. At the end rank 0 calls it with
the trained model on the CPU, in eval() mode, without gradients; it may write files (samples, pictures) into
the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run trains.

    model: makes it with fresh weights, the same each time; under `torch.device("meta")` it has no values.
    loss: as `stretto.capture` takes it. train, held_out: batches. digest: equal for equal data. fill: where
    the model's parameters come without values (`stretto.models.hollow`), gives a Runner those that its rank
    has; every rank calls it. report: what to do at the end, if anything. unit, size: in what speed is
    counted, and how many of it one sample has.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    train: Batches
    held_out: Batches
    digest: str
    fill: Callable[[Runner, nn.Module], None] | None = None
    report: Report | None = None
    unit: str = "samples"
    size: int = 1
    held_out_words: tuple[str, str] = ("", "")
    """What is printed at the end after the held-out loss: its unit, and what to compare it with."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What the run's summary has beside its own."""
    where: str = ""
    """Where the data is."""
    kept: tuple[str, str] = ("", "")
    """Name and content of a file that checkpoints have, the same in one to go on from."""
    vocab_size: int = 0
    """Of text, how many tokens there are."""
    key: str = "task.file"
    source: str = "what task.file makes"
    differing: str = "the file differs, or what it reads"
    """For messages: the setting that data comes from, in words, and why it may differ between machines."""


def check_files(settings: TrainSettings) -> None:
    """Raises UsageError for files that settings name and planning reads, before anything takes long."""
    schedule = settings.parallel.schedule
    if isinstance(schedule, str) and is_own(schedule):
        read_csv(schedule)


def own_task(settings: TaskSettings, seed: int) -> Task:
    """The task that a file defines. Raises UsageError for a file that cannot be read or run, and for one that
    gives no task."""
    path = Path(settings.file).expanduser()
    try:
        code = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"task.file = {settings.file!r} cannot be read ({error.strerror}): {near_path(path, '{} ')}give "
            "a file of Python, relative to the working directory"
        ) from None
    spec = importlib.util.spec_from_file_location(f"{MODULE}{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"task.file = {settings.file!r} is no file of Python: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UsageError(f"task.file = {settings.file!r} cannot import what it needs: {error}") from error
    except SyntaxError as error:
        raise UsageError(f"task.file = {settings.file!r}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"task.file = {settings.file!r}{_line(error, path)}: {_in_words(error)}") from error
    make = getattr(module, FUNCTION, None)
    if not callable(make):
        raise UsageError(
            f"task.file = {settings.file!r} defines no function {FUNCTION}(config, seed), which returns a "
            "stretto.train.task.Task"
        )
    try:
        made = make(dict(settings.config), seed)
    except StrettoError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"task.file = {settings.file!r}{_line(error, path)}: {FUNCTION}(config, seed) failed with "
            f"task.config = {dict(settings.config)}: {_in_words(error)}"
        ) from error
    if not isinstance(made, Task):
        raise UsageError(
            f"task.file = {settings.file!r}: {FUNCTION}(config, seed) is to return a "
            f"stretto.train.task.Task, and returned {made!r:.60}"
        )
    digest = hashlib.sha256(code + made.digest.encode()).hexdigest()
    return replace(made, digest=digest, where=made.where or str(path), kept=(KEPT, digest))


def of_user(error: BaseException) -> str | None:
    """The message for an error that the code of a task's file raised, or let through, later than its function
    `task`: file, function and line, and what of the traceback is from there on. None for others."""
    own = error.__traceback__
    while own is not None and not _is_own(own):
        own = own.tb_next
    if own is None:
        return None
    last = own
    below = own.tb_next
    while below is not None:
        last = below if _is_own(below) else last
        below = below.tb_next
    trace = "".join(format_tb(own)).rstrip()
    return (
        f"task.file: {own.tb_frame.f_code.co_name}() in {last.tb_frame.f_code.co_filename}, line "
        f"{last.tb_lineno}, ended with {_in_words(error)}\n{trace}\n{_in_words(error)}"
    )


def _is_own(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith(MODULE)


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it was raised."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f", line {lines[-1]}" if lines else ""


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

"""What is called as a run goes on, on rank 0: what writes its files, and callbacks of your own.

`output.callbacks` names classes in files of Python, `FILE.py:CLASS`. A class may have any of the methods of
`Callback`; one is made without arguments, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from stretto.config import TrainSettings
from stretto.errors import RunError, StrettoError, UsageError, meant, near_path
from stretto.ir.plan import Plan
from stretto.train.task import of_user, run_file


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run before its next step. folder: where it leaves its files. step: how many are done, 0 for one that
    does not go on."""

    settings: TrainSettings
    plan: Plan
    folder: Path
    step: int


class Callback(Protocol):
    """What is called on rank 0, which other ranks wait for; what it raises ends the run. Lines are those of
    `metrics.jsonl`."""

    def on_start(self, run: RunStart) -> None:
        """Before the first step."""

    def on_step(self, line: Mapping[str, Any]) -> None:
        """After each step: `step`, `loss`, `lr`, `grad_norm`, `step_s` and others."""

    def on_eval(self, line: Mapping[str, Any]) -> None:
        """After each measurement of the held-out loss: `step`, `held_out_loss`."""

    def on_save(self, path: Path) -> None:
        """Once a checkpoint is complete; steps may have been taken since it was begun."""

    def on_end(self, error: BaseException | None) -> None:
        """Before the report, or where the run ends early. error: what ended it then."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def classes_of(settings: TrainSettings) -> list[type]:
    """What `output.callbacks` names; the files are run. Raises UsageError for what is not there, or has none
    of the methods, or others whose names begin as theirs."""
    return [_class(one) for one in settings.output.callbacks]


@cache
def _module(path: Path, content: bytes) -> ModuleType:
    """Each file once, until it is changed: the launcher of a single rank looks at classes, too."""
    return run_file(path)


def _class(text: str) -> type:
    what = f"output.callbacks: {text!r}"
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not file.endswith(".py"):
        raise UsageError(f"{what} is not FILE.py:CLASS, such as log.py:Logger")
    if not path.is_file():
        raise UsageError(f"{what}: {path} does not exist{near_path(path)}")
    try:
        module = _module(path.absolute(), path.read_bytes())
    except (Exception, SystemExit) as error:
        raise UsageError(_words(what, error)) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, one in vars(module).items() if isinstance(one, type)]
        raise UsageError(f"{what}: {path} has no class {name!r} {meant(name, classes)}".rstrip())
    methods = [key for key in dir(found) if key.startswith("on_")]
    wrong = next((key for key in methods if key not in METHODS), None)
    if wrong is not None or not methods:
        known = meant(wrong, METHODS) or f"known are {', '.join(METHODS)}"
        raise UsageError(f"{what} has {f'a method {wrong}' if wrong else 'no method'} of a callback; {known}")
    return found


def _words(what: str, error: BaseException) -> str:
    words = (of_user(error) or f": {type(error).__name__}: {error}").removeprefix("task.file")
    return what + words


def made_of(settings: TrainSettings) -> list[object]:
    """One of each class. Raises RunError for what its `__init__` raises."""
    made: list[object] = []
    for one in classes_of(settings):
        try:
            made.append(one())
        except (Exception, SystemExit) as error:
            raise RunError(_words(f"output.callbacks: {one.__name__}", error)) from error
    return made


class Callbacks:
    """All of a run, called in order; as a context it calls `on_end`. Empty on other ranks than 0."""

    def __init__(self, called: Sequence[object] = ()) -> None:
        self._called = called

    def call(self, method: str, *arguments: object) -> None:
        """Raises RunError, with file and line, for what a callback raises."""
        for one in self._called:
            try:
                getattr(one, method, lambda *_: None)(*arguments)
            except StrettoError:
                raise
            except (Exception, SystemExit) as error:
                raise RunError(_words(f"output.callbacks: {type(one).__name__}", error)) from error

    def __enter__(self) -> Callbacks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """All are called, also where one of them fails; what ended the run is reported, not what follows."""
        with nullcontext() if error is None else suppress(StrettoError), ExitStack() as ends:
            for one in self._called:
                ends.callback(Callbacks([one]).call, "on_end", error)

"""`stretto.save` and `stretto.load`: a Runner, its optimizer and what the user adds, in one folder, whose
files docs/saving.md lists. The trainer's checkpoints are such folders with files of their own beside these.

A save:

    1. All ranks gather what each has; nothing is touched before all could. The rest may be done by a thread
       beside steps, of copies (`stretto.saving.beside`).
    2. Rank 0 makes a folder beside the place, and every rank looks whether it sees it.
    3. All write, and agree that they have.
    4. Rank 0 adds the other files and renames the folder into its place.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from stretto.errors import StrettoError, UsageError
from stretto.runtime import Runner
from stretto.runtime.all_or_none import Ranks, on_first, together
from stretto.saving import digests, folder, tensors
from stretto.saving import optimizer as states
from stretto.saving.beside import Copies, Saving, copies_of, end_save_of, only_writer
from stretto.saving.digests import METADATA
from stretto.saving.tensors import DTYPES

REST = "rest.pt"
FORMAT, VERSION = "stretto saved", 1


def save(path: str | Path, runner: Runner, optimizer: Optimizer | None = None, extra: Any = None) -> None:
    """Write a checkpoint at the folder `path`, complete or not at all; every rank must call it.

    runner, optimizer: parameters, buffers, the optimizer's state and its groups' options, and the count of
    steps that decides dropout. extra: what else to keep, of rank 0's: numbers, strings, tensors, lists and
    dicts of them (an epoch, `scheduler.state_dict()`). What was at `path` stays until this one is complete.

    Raises the same error on all ranks: UsageError when they do not see one folder, `path` has something
    else, or the optimizer is not the Runner's; StrettoError when one could not write, also what `async_save`
    began and no one has waited for.
    """
    end_save_of(runner)
    _prepare_at(path, runner, optimizer, extra)()


def async_save(
    path: str | Path, runner: Runner, optimizer: Optimizer | None = None, extra: Any = None
) -> Saving:
    """As `save`, but it returns once all is copied; every rank must call it, and later `wait()` of what it
    returns, which returns once the checkpoint is complete. Both raise what `save` does.

    Steps may be taken meanwhile. The next save or load waits for this one; call `wait()` before
    `runner.close()`. The copies take the processor's memory for what this rank writes, until the Runner is
    gone.
    """
    copies = copies_of(runner)
    return copies.start(_prepare_at(path, runner, optimizer, extra, copies))


def _prepare_at(
    path: str | Path, runner: Runner, optimizer: Optimizer | None, extra: Any, copies: Copies | None = None
) -> Callable[[], None]:
    place = Path(path).absolute()
    rest = f"What was at {place} is as it was" if is_saved(place) else "Nothing is there"
    writing = folder.Writing(f"{place}", "save into a folder on another disk", rest)
    setting = "the path to save to"
    return prepare(place, runner, optimizer, extra, writing=writing, setting=setting, copies=copies)


def load(path: str | Path, runner: Runner, optimizer: Optimizer | None = None) -> Any:
    """Read what `save` wrote under any layout into this Runner and its optimizer; every rank must call it.

    path: a folder that `save` or `stretto train` wrote. optimizer: of the same class and groups; its state
    and its groups' options become the saved ones. Returns `extra`, on every rank.

    Raises the same error on all ranks, before anything is changed: UsageError when there is no checkpoint,
    ranks find different ones, or it does not fit; StrettoError when it cannot be read, or what `async_save`
    began, which comes to its end first, could not be written.
    """
    end_save_of(runner)
    return fill(find_saved(Path(path).absolute(), runner), runner, optimizer)


def is_saved(place: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return (place / METADATA).is_file() and (place / REST).is_file()


def find_saved(place: Path, runner: Runner) -> Path:
    """At its place, or beside it when a save was killed between its renames; every rank must call it."""

    def find() -> Path:
        for candidate in (place, folder.old_of(place)):
            if is_saved(candidate):
                return candidate
        what = "has no complete checkpoint" if place.exists() else "does not exist"
        raise UsageError(f"{place} {what}: name the folder that was given to stretto.save")

    return together(runner.transport, find)


# Steps, for the trainer too.


def prepare(
    place: Path,
    runner: Runner,
    optimizer: Optimizer | None,
    extra: Any,
    *,
    writing: folder.Writing,
    setting: str,
    files: Mapping[str, bytes] | None = None,
    copies: Copies | None = None,
) -> Callable[[], None]:
    """Step 1 of a checkpoint at `place` with `files` beside its own, and what does the rest; every rank must
    call both. setting: what the user sets to move it. writing: words a failure. copies: where the rest is
    done beside steps.

    Both raise on all ranks, with what was at `place` as it was.
    """
    transport = runner.transport
    first = runner.rank == 0

    def copied(parts: tensors.Parts) -> tensors.Parts:
        return parts if copies is None else copies.of(parts, only_writer(runner, optimizer))

    def owned_and_table() -> tuple[tensors.Parts, states.OptimizerTable | None]:
        is_free = not first or not place.exists() or is_saved(place)
        if not is_free and not (place.is_dir() and not any(place.iterdir())):
            raise UsageError(f"{place} exists and is no checkpoint: name another folder, or remove it")
        owned = runner.tensors.owned_parts()
        if optimizer is None:
            return copied(owned), None
        table, parts = states.state_of(runner, optimizer)
        mine = {key: part for key, part in parts.items() if runner.owns(states.name_and_key(key)[0])}
        return copied(owned | mine), table

    owned, mine = together(transport, owned_and_table)
    tables = transport.all_gather(mine)

    def pack() -> bytes:
        table = states.merged(tables) if mine is not None else None
        extras = {n: m.get_extra_state() for n, m in runner.plain_state.with_extra_state().items()}
        return _packed(table, runner.state.steps, extra if first else None, extras if first else {})

    sealed = {REST: together(transport, pack), **(files or {})}
    ranks: Ranks = transport if copies is None else copies.ranks
    return partial(_write, place, owned, sealed, ranks, writing, setting)


def _write(
    place: Path,
    owned: tensors.Parts,
    files: Mapping[str, bytes],
    ranks: Ranks,
    writing: folder.Writing,
    setting: str,
) -> None:
    def begin() -> str:  # step 2
        with writing:
            return folder.begin(place)

    probe = on_first(ranks, begin)
    try:
        looks = ranks.all_gather(folder.look(folder.partial_of(place), probe))
        folder.refuse_apart(looks, setting)
        files_of_tensors = tensors.write(folder.partial_of(place), owned, ranks, writing)  # step 3

        def finish() -> None:  # step 4
            sealed = {**files_of_tensors, **files}
            with writing:
                for name, data in {**sealed, digests.NAME: digests.sealed(sealed)}.items():
                    if name != METADATA:  # which is written
                        folder.write_synced(folder.partial_of(place) / name, data)
                folder.commit(place, probe)

        on_first(ranks, finish)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(folder.partial_of(place), ignore_errors=True)  # so that it does not fill the disk
        raise


def fill(checkpoint: Path, runner: Runner, optimizer: Optimizer | None, *, options: bool = True) -> Any:
    """Read a checkpoint into the Runner and the optimizer; every rank must call it. Returns `extra`.

    options: whether the groups' options become the saved ones. Raises on all ranks; a failure after the
    checks leaves a Runner that takes no step until something is loaded.
    """
    end_save_of(runner)
    transport = runner.transport

    def check() -> tuple[Callable[[], None], _Rest, dict[str, Any], list[Any]]:
        rest = _unpacked(checkpoint)
        stored = tensors.stored_in(checkpoint)
        parts = runner.tensors.parts()
        tensors.check_fit(checkpoint, parts, stored)
        known_names = {f"model.{parameter.tied_to}" for parameter in runner.plan.job.parameters}
        more = sorted({name for name in stored if name.startswith("model.")} - known_names)
        if more:
            raise StrettoError(
                f"{checkpoint} has {more[0]}, and this model has no such parameter: it is of another model; "
                "take another checkpoint"
            )
        made: dict[str, Any] = {}
        groups: list[Any] = []
        if optimizer is not None:
            states.state_of(runner, optimizer)  # refuses one over what is not the runner's
            if rest.table is None:
                raise UsageError(f"{checkpoint} was saved without an optimizer: load without one")
            states.check_kind(optimizer, rest.table)
            of_states = {name: one for name, one in stored.items() if name.startswith("optimizer.")}
            described = [(name, one.shape, DTYPES[one.dtype]) for name, one in of_states.items()]
            made = states.new_tensors(runner, optimizer, described)
            groups = [None] * len(optimizer.param_groups)
            if options:
                groups = states.options_for(runner, optimizer, rest.table)
            state_parts = {name: part for name, (_, part) in made.items()}
            tensors.check_fit(checkpoint, state_parts, stored)
            parts |= state_parts
        read = partial(tensors.read, checkpoint, stored, parts)
        return read, rest, {name: tensor for name, (tensor, _) in made.items()}, groups

    read, rest, made, groups = together(transport, check)
    digests.refuse_others(transport.all_gather(digests.identity(checkpoint)), checkpoint)
    runner.unfit = f"{checkpoint} was read in part: load a complete checkpoint"
    together(transport, read)
    if optimizer is not None and (table := rest.table) is not None:

        def install() -> None:
            try:
                states.install(runner, optimizer, made, table, groups)
            except Exception as error:  # whatever the optimizer's class makes of a state that lacks something
                raise digests.unusable(checkpoint, digests.reason(error)) from None

        together(transport, install)
        states.warn_of_differences(runner, optimizer, table)
    runner.state.steps = rest.draws
    runner.loaded()

    def set_extra_states() -> None:
        modules = runner.plain_state.with_extra_state()
        for name, value in rest.model.items():
            try:
                modules[name].set_extra_state(value)
            except Exception as error:  # of the model's own code; or it has no such module
                raise digests.unusable(checkpoint, digests.reason(error)) from None

    together(transport, set_extra_states)
    return rest.extra


@dataclass(frozen=True, slots=True)
class _Rest:
    """What is beside the tensors."""

    table: states.OptimizerTable | None
    draws: int
    extra: Any
    model: dict[str, Any]


def _packed(table: states.OptimizerTable | None, draws: int, extra: Any, model: dict[str, Any]) -> bytes:
    """The file of the rest. model: the extra state of its modules. Raises UsageError for what could not be
    read again."""
    optimizer = None if table is None else asdict(table)
    data = {"format": FORMAT, "version": VERSION, "draws": draws, "optimizer": optimizer, "extra": extra}
    data |= {"model": model} if model else {}
    file = io.BytesIO()
    try:
        torch.save(data, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError, RuntimeError) as error:
        what = "extra" if optimizer is None else "extra, or an option of the optimizer's groups,"
        what += " or what the model's get_extra_state gives" if model else ""
        reason = next(
            (line for line in str(error).splitlines() if "Unsupported" in line or "global" in line),
            str(error),
        )
        raise UsageError(
            f"{what} cannot be saved ({reason.strip()[:200]}): give numbers, strings, tensors, lists and "
            "dicts"
        ) from None
    return file.getvalue()


def _unpacked(checkpoint: Path) -> _Rest:
    """The rest. Raises StrettoError."""
    content = digests.read_checked(checkpoint, REST)
    try:
        data = torch.load(io.BytesIO(content), weights_only=True)
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise UsageError(
                f"{checkpoint / REST}: format {data['format']!r}, version {data['version']}; this "
                f"Stretto reads {FORMAT!r}, version {VERSION}"
            )
        table = None if data["optimizer"] is None else states.OptimizerTable.of_data(data["optimizer"])
        return _Rest(table, int(data["draws"]), data["extra"], dict(data.get("model", {})))
    except StrettoError:
        raise
    except Exception as error:
        raise digests.unusable(checkpoint, digests.reason(error)) from None

"""Checkpoints: what a run needs to go on, written by all ranks together and read by any other split.

Tensors are stored under the parameters' names in the model, by PyTorch's own distributed checkpoints: each
rank writes what it owns, and reads what it holds, whoever wrote it. A checkpoint counts once every rank has
finished; until then the one before it stays. The position in the data is a pure function of the step.

    model.<name>                a parameter, under the first name of its tie
    buffer.<name>               a buffer that the computation reads or writes
    optimizer.<name>.<part>     AdamW's state: step, exp_avg, exp_avg_sq
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stretto.errors import LostRankError, StrettoError
from stretto.runtime import Runner
from stretto.train.checkpoint_files import State, abandon, begin, commit, failed
from stretto.train.notes import is_lost_connection
from stretto.train.optimizer import state_of

Tensors = dict[str, torch.Tensor]


def save(
    folder: Path, state: State, tokenizer: str, runner: Runner, optimizer: torch.optim.AdamW, keep: int
) -> Path:
    """Write the checkpoint of `state.step` into `folder`; every rank must call it. Returns its path.

    keep: how many of the newest stay. Raises the same StrettoError on all ranks when a rank could not
    write; the checkpoints from before stay as they were.
    """
    partial = _on_first(runner, lambda: begin(folder, state.step))
    try:
        with warnings.catch_warnings():
            # In a single process it warns that it is one.
            warnings.simplefilter("ignore", UserWarning)
            dcp_save(
                owned_tensors(runner, optimizer),
                storage_writer=FileSystemWriter(partial),
                no_dist=runner.transport.size == 1,
            )
    except (CheckpointException, OSError, RuntimeError) as error:
        if is_lost_connection(_cause(error)):
            raise LostRankError(
                f"rank {runner.rank}: a rank was lost while the checkpoint of step {state.step} was written; "
                "resume from the last checkpoint",
                None,
            ) from None
        if runner.rank == 0:
            abandon(partial)
        raise failed(folder, state.step, _cause(error)) from None
    return _on_first(runner, lambda: commit(partial, state, tokenizer, keep))


def load(checkpoint: Path, runner: Runner, optimizer: torch.optim.AdamW) -> None:
    """Read this rank's parameters, buffers and optimizer state in place, whatever split wrote them.

    Raises StrettoError for a checkpoint that cannot be read or lacks something.
    """
    read_tensors(checkpoint, held_tensors(runner, optimizer))


def read_tensors(checkpoint: Path, tensors: Tensors) -> None:
    """Fill `tensors` in place with what the checkpoint holds under their names. Raises StrettoError."""
    reader = FileSystemReader(checkpoint)
    try:
        known = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(checkpoint, error) from None
    lacking = [name for name in tensors if name not in known]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise StrettoError(
            f"{checkpoint} lacks {lacking[0]}{more}: it is of another model; resume from another checkpoint, "
            "or start anew with --no-resume"
        )
    for name, tensor in tensors.items():
        size = tuple(getattr(known[name], "size", ()))
        if size != tuple(tensor.shape):
            raise StrettoError(
                f"{checkpoint}: {name} has the shape {list(size)}, and this model's {list(tensor.shape)}; "
                "resume from another checkpoint, or start anew with --no-resume"
            )
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", UserWarning)
            dcp_load(dict(tensors), storage_reader=reader, no_dist=True)
    except Exception as error:
        raise _unreadable(checkpoint, error) from None


def names_in(checkpoint: Path) -> set[str]:
    """The names of all tensors in a checkpoint. Raises StrettoError."""
    try:
        return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    except Exception as error:
        raise _unreadable(checkpoint, error) from None


def held_tensors(runner: Runner, optimizer: torch.optim.AdamW) -> Tensors:
    """All that this rank holds, by name in the checkpoint; views of the tensors themselves."""
    tied_to = {p.name: p.tied_to for p in runner.plan.job.parameters}
    trained = {p.tied_to for p in runner.plan.job.parameters if p.grads}
    found: Tensors = {}
    for name, parameter in runner.named_parameters():
        first = tied_to[name]
        found[f"model.{first}"] = parameter.detach()
        if first in trained:
            for part, value in state_of(optimizer, parameter).items():
                found[f"optimizer.{first}.{part}"] = value
    for name, buffer in runner.named_buffers():
        found[f"buffer.{name}"] = buffer
    return found


def owned_tensors(runner: Runner, optimizer: torch.optim.AdamW) -> Tensors:
    """What this rank is the one to write."""
    tied_to = {p.name: p.tied_to for p in runner.plan.job.parameters}
    owned = {tied_to[name] for name, _ in runner.named_parameters() if runner.owns(name)}
    held = held_tensors(runner, optimizer)
    kept = {f"model.{name}" for name in owned}
    kept |= {key for key in held for name in owned if key.startswith(f"optimizer.{name}.")}
    for buffer in runner.plan.job.buffers:
        stages = {*buffer.stages, *(stage for stage, _, _ in buffer.updates)}
        writers = {stage for stage, _, _ in buffer.updates} or stages
        if writers and min(map(runner.plan.rank_of, writers)) == runner.rank:
            kept.add(f"buffer.{buffer.name}")
    return {key: value for key, value in held.items() if key in kept}


def _on_first(runner: Runner, work: Callable[[], Path]) -> Path:
    """Do it on rank 0 and tell all; its StrettoError is raised on every rank."""
    outcome: Path | StrettoError | None = None
    if runner.rank == 0:
        try:
            outcome = work()
        except StrettoError as error:
            outcome = error
    told = runner.transport.all_gather(outcome)[0]
    if isinstance(told, StrettoError):
        raise told
    assert isinstance(told, Path)
    return told


def _cause(error: BaseException) -> BaseException:
    """The first failure of any rank inside what PyTorch raises for all of them."""
    if isinstance(error, CheckpointException):
        for failure in error.failures.values():
            found = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(found, BaseException):
                return found
    return error


def _unreadable(checkpoint: Path, error: BaseException) -> StrettoError:
    cause = _cause(error)
    text = str(cause).strip().splitlines()
    return StrettoError(
        f"{checkpoint} cannot be read ({type(cause).__name__}: {text[-1] if text else 'no reason given'}); "
        "resume from another checkpoint (checkpoint.resume), or start anew with --no-resume"
    )

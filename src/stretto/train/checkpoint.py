"""Checkpoints: what a run needs to go on, written by all ranks together and read by any other split.

Tensors are stored whole, under the parameters' names in the model, by PyTorch's own distributed checkpoints:
each rank writes what it owns, its part of what is spread, and reads what it holds, whoever wrote it
(`stretto.train.checkpoint_parts`). A checkpoint counts once every rank has finished; until then the one
before it stays. The position in the data is a pure function of the step.

    model.<name>                a parameter, under the first name of its tie
    buffer.<name>               a buffer that the computation reads or writes
    optimizer.<name>.<part>     AdamW's state: step, exp_avg, exp_avg_sq
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stretto.errors import LostRankError, StrettoError
from stretto.runtime import Runner
from stretto.runtime.shards import pieces_of, whole_spec
from stretto.train.checkpoint_files import State, abandon, begin, commit, failed
from stretto.train.checkpoint_parts import Part, Parts, PartsReader, PartsWriter
from stretto.train.notes import is_lost_connection
from stretto.train.optimizer import state_of


def save(
    folder: Path, state: State, tokenizer: str, runner: Runner, optimizer: torch.optim.AdamW, keep: int
) -> Path:
    """Write the checkpoint of `state.step` into `folder`; every rank must call it. Returns its path.

    keep: how many of the newest stay. Raises the same StrettoError on all ranks when a rank could not
    write; the checkpoints from before stay as they were.
    """
    partial = _on_first(runner, lambda: begin(folder, state.step))
    owned = owned_parts(runner, optimizer)
    try:
        with warnings.catch_warnings():
            # In a single process it warns that it is one.
            warnings.simplefilter("ignore", UserWarning)
            dcp_save(
                _one_each(owned),
                storage_writer=FileSystemWriter(partial),
                planner=PartsWriter(owned),
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
    _read(checkpoint, held_parts(runner, optimizer))


def read_tensors(checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` in place with what the checkpoint holds under their names. Raises StrettoError."""
    _read(checkpoint, {name: Part.all_of(tensor) for name, tensor in tensors.items()})


def _read(checkpoint: Path, parts: Parts) -> None:
    reader = FileSystemReader(checkpoint)
    try:
        known = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(checkpoint, error) from None
    lacking = [name for name in parts if name not in known]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise StrettoError(
            f"{checkpoint} lacks {lacking[0]}{more}: it is of another model; resume from another checkpoint, "
            "or start anew with --no-resume"
        )
    for name, part in parts.items():
        size = tuple(getattr(known[name], "size", ()))
        if size != part.whole:
            raise StrettoError(
                f"{checkpoint}: {name} has the shape {list(size)}, and this model's {list(part.whole)}; "
                "resume from another checkpoint, or start anew with --no-resume"
            )
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", UserWarning)
            dcp_load(_one_each(parts), storage_reader=reader, planner=PartsReader(parts), no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise _unreadable(checkpoint, error) from None


def names_in(checkpoint: Path) -> set[str]:
    """The names of all tensors in a checkpoint. Raises StrettoError."""
    try:
        return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    except Exception as error:
        raise _unreadable(checkpoint, error) from None


def held_parts(runner: Runner, optimizer: torch.optim.AdamW) -> dict[str, Part]:
    """All that this rank holds, by name in the checkpoint; views of the tensors themselves."""
    job = runner.plan.job
    known = {p.name: p for p in job.parameters}
    trained = {p.tied_to for p in job.parameters if p.grads}

    def spread(name: str, held: torch.Tensor) -> Part:
        """What has the shape of this rank's part of the parameter; numbers beside it are everywhere equal."""
        parameter = known[name]
        if tuple(held.shape) != parameter.spec.shape:
            return Part.all_of(held)
        boxes = pieces_of(held, parameter, job, runner.coordinates)
        return Part(whole_spec(job, parameter).shape, tuple(boxes))

    found: dict[str, Part] = {}
    for name, parameter in runner.named_parameters():
        first = known[name].tied_to
        found[f"model.{first}"] = spread(name, parameter.detach())
        if first in trained:
            for part, value in state_of(optimizer, parameter).items():
                found[f"optimizer.{first}.{part}"] = spread(name, value)
    for name, buffer in runner.named_buffers():
        found[f"buffer.{name}"] = Part.all_of(buffer)
    return found


def owned_parts(runner: Runner, optimizer: torch.optim.AdamW) -> dict[str, Part]:
    """What this rank writes: it is the one to write it, or one of those that hold the same."""
    tied_to = {p.name: p.tied_to for p in runner.plan.job.parameters}
    owned = {tied_to[name] for name, _ in runner.named_parameters() if runner.owns(name)}
    held = held_parts(runner, optimizer)
    kept = {f"model.{name}" for name in owned}
    kept |= {key for key in held for name in owned if key.startswith(f"optimizer.{name}.")}
    copy = any(at for axis, at in runner.coordinates.items() if axis != "pp")
    for buffer in runner.plan.job.buffers:
        stages = {*buffer.stages, *(stage for stage, _, _ in buffer.updates)}
        writers = {stage for stage, _, _ in buffer.updates} or stages
        if writers and not copy and min(map(runner.plan.rank_of, writers)) == runner.coordinates["pp"]:
            kept.add(f"buffer.{buffer.name}")
    return {key: part for key, part in held.items() if key in kept}


def _one_each(parts: Parts) -> dict[str, torch.Tensor]:
    """A tensor under each name, as PyTorch wants to be told; the planners know what is in it."""
    return {name: part.boxes[0][1] for name, part in parts.items()}


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
    """A failed read in the user's words. Raises what interrupted it instead, if anything did."""
    cause = _cause(error)
    if not isinstance(cause, Exception | CheckpointException):
        raise cause  # PyTorch takes a Ctrl-C while it reads for a failure to read
    text = str(cause).strip().splitlines()
    return StrettoError(
        f"{checkpoint} cannot be read ({type(cause).__name__}: {text[-1] if text else 'no reason given'}); "
        "resume from another checkpoint (checkpoint.resume), or start anew with --no-resume"
    )

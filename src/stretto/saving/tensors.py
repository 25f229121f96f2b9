"""Tensors of all ranks in one folder, written and read by PyTorch's distributed checkpoints.

The steps are those of `torch.distributed.checkpoint.save`, with its own planners and files, but ranks speak
through the Runner's transport: so ranks may be threads, and all of them agree before the table of contents
(`.metadata`) is written, without which the folder is nothing.

    1. Each rank says what it writes; every rank makes the same plan of all.
    2. Each rank writes its file, and all agree that they have.
    3. Rank 0 looks whether it sees every file whole, and writes the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from stretto.errors import StrettoError
from stretto.runtime.all_or_none import on_first, together_slowly
from stretto.runtime.transport import Transport
from stretto.saving.folder import Writing
from stretto.saving.parts import Parts, PartsReader, PartsWriter

METADATA = ".metadata"
"""The table of contents, as PyTorch names it."""

Stored = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> whole shape and dtype of a tensor in a folder."""


def write(folder: Path, owned: Parts, transport: Transport, writing: Writing) -> None:
    """Write all ranks' parts into an empty folder that all see; every rank must call it.

    writing: words a failure. Raises its StrettoError on all ranks when one could not write.
    """
    first = transport.rank == 0
    planner, writer = PartsWriter(owned), FileSystemWriter(folder)
    planner.set_up_planner(_one_each(owned), writer.storage_meta(), first)
    writer.set_up_storage_writer(first)
    plans = transport.all_gather(planner.create_local_plan())  # step 1
    plans, table = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[transport.rank])

    def write_mine() -> list[WriteResult]:  # step 2
        if not plan.items:
            return []
        with writing:
            try:
                future: Any = writer.write_data(plan, planner)
                future.wait()
                results: list[WriteResult] = future.value()
                return results
            except CheckpointException as error:
                cause = _cause(error)
            raise cause  # out here, where what led to it stays its context

    results = transport.all_gather(together_slowly(transport, write_mine))

    def write_table() -> None:  # step 3
        with writing:
            table.storage_data = {one.index: one.storage_data for rank in results for one in rank}
            for fault in _faults(folder, table):
                raise RuntimeError(fault)
            writer.finish(table, results)

    on_first(transport, write_table)


def stored_in(folder: Path) -> Stored:
    """What a folder holds, every file of which is whole. Raises StrettoError."""
    try:
        table = FileSystemReader(folder).read_metadata()
        fault = next(_faults(folder, table), None)
        found = {
            name: (tuple(one.size), one.properties.dtype)
            for name, one in table.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
    except Exception as error:
        raise unreadable(folder, error) from None
    if fault is not None:
        raise StrettoError(f"{folder} cannot be read ({fault}); take another checkpoint")
    return found


def read(folder: Path, parts: Parts) -> None:
    """Fill the parts in place, whatever layout wrote the folder, which has them (`stored_in`). No rank waits
    for another. Raises StrettoError when it cannot be read; parts may then have been filled."""
    try:
        with torch.no_grad():
            planner, reader = PartsReader(parts), FileSystemReader(folder)
            table = reader.read_metadata()
            planner.set_up_planner(_one_each(parts), table, True)
            reader.set_up_storage_reader(table, True)
            plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
            plan = planner.finish_plan(reader.prepare_global_plan(plans)[0])
            reader.read_data(plan, planner).wait()
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise unreadable(folder, error) from None


def check_fit(folder: Path, parts: Parts, stored: Stored) -> None:
    """Raises StrettoError where the folder lacks a part's tensor, or has it in another shape."""
    lacking = [name for name in parts if name not in stored]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise StrettoError(
            f"{folder} lacks {lacking[0]}{more}: it is of another model; take another checkpoint"
        )
    for name, part in parts.items():
        size, _ = stored[name]
        if size != part.whole:
            raise StrettoError(
                f"{folder}: {name} has the shape {list(size)}, and this model's {list(part.whole)}; "
                "take another checkpoint"
            )


def unreadable(folder: Path, error: BaseException) -> StrettoError:
    """A failed read in the user's words. Raises what interrupted it instead, if anything did."""
    cause = _cause(error)
    if not isinstance(cause, Exception | CheckpointException):
        raise cause  # PyTorch takes a Ctrl-C while it reads for a failure to read
    text = str(cause).strip().splitlines()
    return StrettoError(
        f"{folder} cannot be read ({type(cause).__name__}: {text[-1] if text else 'no reason given'}); "
        "take another checkpoint"
    )


def _faults(folder: Path, table: Metadata) -> Iterator[str]:
    """Files that are absent or end too early."""
    ends: dict[str, int] = {}
    for info in (table.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name} is not there"
            continue
        if size < end:
            yield f"{name} has {size} bytes of {end}"


def _one_each(parts: Parts) -> dict[str, torch.Tensor]:
    """A tensor under each name, as PyTorch wants to be told; the planners know what is in it."""
    return {name: part.boxes[0][1] for name, part in parts.items()}


def _cause(error: BaseException) -> BaseException:
    """The first failure of any rank inside what PyTorch raises for all of them."""
    if isinstance(error, CheckpointException):
        for failure in error.failures.values():
            found = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(found, BaseException):
                return found
    return error

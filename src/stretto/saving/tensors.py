"""Tensors of all ranks in one folder, written and read by PyTorch's distributed checkpoints.

A checkpoint has full tensors only: a rank writes boxes of them, with their offsets, and reads the boxes that
it needs, whichever boxes were written. So it is free of the layout that wrote it. The steps are those of
`torch.distributed.checkpoint.save`, with its own planners and files, but ranks use the Runner's transport, or
one beside it: so ranks may be threads, and all of them agree before the table of contents (`.metadata`) is
written, without which the folder is nothing.

    1. All ranks gather what each writes; every rank makes the same plan of all.
    2. Each rank writes its file, takes the digest of each box, and all agree that they have.
    3. Rank 0 looks whether it sees every file complete, and writes the table.

Reading goes by `tensors.json`, which says the same as `.metadata` as data: where each box is, and its digest.
Boxes of a tensor cover it once, so that what is allocated for one is bounded by bytes that are there. A rank
reads the boxes that meet its parts.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from stretto.errors import StrettoError, listed
from stretto.files.codec import Codec, Fits, TextLayout
from stretto.files.typed_file import TypedFile
from stretto.runtime.all_or_none import Ranks, together
from stretto.runtime.rank_tensors import Part
from stretto.saving.digests import (
    METADATA,
    TABLE,
    Digest,
    FileName,
    digest_of,
    parsed,
    read_checked,
    reason,
    unusable,
)
from stretto.saving.folder import Writing

DTYPES = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}

Size = Annotated[int, Fits(lambda value: value >= 0, "an integer from 0")]
DtypeName = Annotated[str, Fits(lambda name: name in DTYPES, "the name of a dtype of PyTorch")]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: what `torch.save` wrote of it is in `file` from byte `start` on."""

    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]
    file: FileName
    start: Size
    nbytes: Size
    digest: Digest


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A full tensor."""

    shape: tuple[Size, ...]
    dtype: DtypeName
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class TensorTable:
    """tensors: name -> what is stored of it."""

    tensors: Mapping[str, StoredTensor]


_CODEC = Codec()
_CODEC.row(Box, 6, TextLayout.ENTRY)
FILE = TypedFile(TensorTable, "stretto-tensors", 1, "tensors", "Take another checkpoint", _CODEC)

Slices = tuple[slice, ...]
Parts = Mapping[str, Part]
"""Name in the checkpoint -> part."""


class PartsPlanner(DefaultSavePlanner):
    """Plans this rank's parts. Ranks that name the same box have the same values: one of them writes it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._views = {
            (name, torch.Size(offsets)): view for name, part in parts.items() for offsets, view in part.boxes
        }

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(offsets, view.shape),
                        TensorProperties.create_from_tensor(view),
                        torch.Size(self._parts[name].full_shape),
                    ),
                )
                for (name, offsets), view in self._views.items()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._views[index.fqn, index.offset]


def write(folder: Path, owned: Parts, ranks: Ranks, writing: Writing) -> dict[str, bytes]:
    """Write all ranks' parts into an empty folder that all see; every rank must call it. Returns on rank 0
    the files that say where they are: `tensors.json`, to be written, and `.metadata`, which is.

    writing: words a failure. Raises its StrettoError on all ranks when one could not write.
    """
    first = ranks.rank == 0
    planner, writer = PartsPlanner(owned), FileSystemWriter(folder)
    # PyTorch wants a tensor under each name; the planner knows the others of it.
    some = {name: part.boxes[0][1] for name, part in owned.items() if part.boxes}
    planner.set_up_planner(some, writer.storage_meta(), first)
    writer.set_up_storage_writer(first)
    plans = ranks.all_gather(planner.create_local_plan())  # step 1
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])

    def write_mine() -> list[tuple[WriteResult, str]]:  # step 2
        if not plan.items:
            return []
        with writing:
            return _digested(folder, writer.write_data(plan, planner).wait())

    results = ranks.all_gather(together(ranks, write_mine))

    def write_table() -> dict[str, bytes]:  # step 3
        with writing:
            for wrote in results:
                for one, _ in wrote:
                    seen, place = folder / one.storage_data.relative_path, one.storage_data
                    if seen.stat().st_size < place.offset + place.length:
                        raise RuntimeError(f"{place.relative_path} is shorter than what a rank wrote")
            writer.finish(metadata, [[one for one, _ in wrote] for wrote in results])
            table = _table(metadata, (one for wrote in results for one in wrote))
            return {TABLE: table, METADATA: (folder / METADATA).read_bytes()}

    return together(ranks, write_table if first else dict)


def stored_in(folder: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a checkpoint, every file of which is as long as it was. Raises UsageError."""
    read_checked(folder, METADATA)  # which is for PyTorch's own readers
    table = parsed(folder, FILE, TABLE, read_checked(folder, TABLE))
    fault = next(_faults(folder, table.tensors), None)
    if fault is not None:
        raise unusable(folder, fault)
    return table.tensors


def _faults(folder: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Boxes that do not cover their tensor; files that are absent or end too early."""
    ends: dict[str, int] = {}
    for name, one in tensors.items():
        for box in one.boxes:
            ends[box.file] = max(ends.get(box.file, 0), box.start + box.nbytes)
            fits = len(box.offsets) == len(box.sizes) == len(one.shape) and all(
                first + size <= full
                for first, size, full in zip(box.offsets, box.sizes, one.shape, strict=True)
            )
            if not fits or prod(box.sizes) * DTYPES[one.dtype].itemsize > box.nbytes:
                yield f"a box of {name} in {TABLE} is not one of its tensor"
        if sum(prod(box.sizes) for box in one.boxes) != prod(one.shape):
            yield f"the boxes of {name} in {TABLE} do not cover it"
    for file, end in sorted(ends.items()):
        try:
            size = (folder / file).stat().st_size
        except OSError:
            yield f"{file} is not there"
            continue
        if size < end:
            yield f"{file} has {size} bytes of {end}"


@torch.no_grad()
def read(folder: Path, stored: Mapping[str, StoredTensor], parts: Parts) -> None:
    """Fill the parts in place, whatever layout wrote the folder, which has them (`stored_in`). No rank waits
    for another. Raises StrettoError when it cannot be read, or has changed since it was written; parts may
    then have been filled."""
    wanted: dict[str, dict[Box, list[tuple[torch.Tensor, Slices]]]] = {}
    for name, part in parts.items():
        for offsets, view in part.boxes:
            for box in stored[name].boxes:
                common = [
                    (max(one, other), min(one + size, other + length))
                    for one, size, other, length in zip(
                        box.offsets, box.sizes, offsets, view.shape, strict=True
                    )
                ]
                if all(first < end for first, end in common):
                    here = view[_within(common, offsets)], _within(common, box.offsets)
                    wanted.setdefault(box.file, {}).setdefault(box, []).append(here)
    dtypes = {box: DTYPES[one.dtype] for one in stored.values() for box in one.boxes}
    try:
        for name in sorted(wanted):
            with (folder / name).open("rb") as file:
                for box in sorted(wanted[name], key=lambda box: box.start):
                    made = _load(file, box, dtypes[box])
                    for view, slices in wanted[name][box]:
                        view.copy_(made[slices])
    except Exception as error:
        raise unusable(folder, reason(error)) from None


def _load(file: BinaryIO, box: Box, dtype: torch.dtype) -> torch.Tensor:
    file.seek(box.start)
    data = file.read(box.nbytes)
    if digest_of(data) != box.digest:
        raise ValueError(f"{box.file} is not what was saved: the digest of a tensor in it differs")
    made = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(made, torch.Tensor) or tuple(made.shape) != box.sizes or made.dtype != dtype:
        raise ValueError(f"{box.file} has another tensor than {TABLE} has")
    return made


def _within(box: Sequence[tuple[int, int]], origin: Sequence[int]) -> Slices:
    return tuple(slice(first - at, end - at) for (first, end), at in zip(box, origin, strict=True))


def check_fit(folder: Path, parts: Parts, stored: Mapping[str, StoredTensor]) -> None:
    """Raises StrettoError where the folder lacks a part's tensor, or has it in another shape."""
    lacking = [name for name in parts if name not in stored]
    if lacking:
        raise StrettoError(
            f"{folder} lacks {listed(lacking)}: it is of another model; take another checkpoint"
        )
    for name, part in parts.items():
        shape = stored[name].shape
        if shape != part.full_shape:
            raise StrettoError(
                f"{folder}: {name} has the shape {list(shape)}, and this model's {list(part.full_shape)}; "
                "take another checkpoint"
            )


def _table(metadata: Metadata, results: Iterable[tuple[WriteResult, str]]) -> bytes:
    """What all ranks wrote, as data. results: each with its digest."""
    boxes: dict[str, list[Box]] = {}
    stored: dict[str, StoredTensor] = {}
    at = {(one.index.fqn, one.index.offset): (one.storage_data, digest) for one, digest in results}
    for name, one in metadata.state_dict_metadata.items():
        assert isinstance(one, TensorStorageMetadata)
        for chunk in one.chunks:
            where, digest = at[name, chunk.offsets]
            place = (where.relative_path, where.offset, where.length)
            boxes.setdefault(name, []).append(Box(tuple(chunk.offsets), tuple(chunk.sizes), *place, digest))
        dtype = str(one.properties.dtype).removeprefix("torch.")
        stored[name] = StoredTensor(tuple(one.size), dtype, tuple(boxes[name]))
    return FILE.to_text(TensorTable(stored)).encode()


def _digested(folder: Path, results: Sequence[WriteResult]) -> list[tuple[WriteResult, str]]:
    """With the digests of what was written; read from the system's cache."""
    digested: list[tuple[WriteResult, str]] = []
    for one in results:
        with (folder / one.storage_data.relative_path).open("rb") as file:
            file.seek(one.storage_data.offset)
            digested.append((one, digest_of(file.read(one.storage_data.length))))
    return digested

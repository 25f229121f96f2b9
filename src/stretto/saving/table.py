"""The table of a checkpoint's tensors, `tensors.json`: where each box of each tensor is, and its digest.

It has what PyTorch's `.metadata` has, which is a pickle and so a program: that is written for PyTorch's own
readers, and read, as data, only of checkpoints from before there was this table. Boxes of a tensor cover it
once, so that what is allocated for one is bounded by bytes that are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import torch

from stretto.files.codec import Codec
from stretto.files.form import Fits, Layout
from stretto.files.typed_file import TypedFile
from stretto.saving.digests import TABLE, Digest, FileName, UnusableError, is_sealed, read_checked, unusable
from stretto.saving.metadata_adapter import read_metadata

METADATA = ".metadata"
"""The table as PyTorch names it."""

DTYPES = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}

Size = Annotated[int, Fits(lambda value: value >= 0, "a whole number from 0")]
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
_CODEC.row(Box, 6, Layout.ENTRY)
FILE = TypedFile(TensorTable, "stretto-tensors", 1, "tensors", "Take another checkpoint", _CODEC)


def read_table(folder: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a checkpoint, every file of which is as long as it was. Raises UsageError."""
    try:
        if is_sealed(folder):
            table = FILE.from_text(read_checked(folder, TABLE).decode(), TABLE)
        else:
            table = _CODEC.form(TensorTable).read(read_metadata(read_checked(folder, METADATA)))
    except UnusableError:
        raise
    except (Exception, RecursionError) as error:  # whatever a pickle makes of it
        raise unusable(folder, str(error) or type(error).__name__) from None
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

"""PyTorch's `.metadata`, which is a pickle, read as data: for checkpoints that were written before
`tensors.json` was.

A pickle names what it calls. Here it may name the classes of such a table and nothing else, and Python's own
unpickler reads it: the faster one of C allocates whatever an opcode asks for. Private here: `_StorageInfo`,
`_MEM_FORMAT_ENCODING` and `_get_layout` of PyTorch, which are named in these files, and `pickle._Unpickler`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout

KNOWN: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PurePosixPath,  # where it was written, which is not looked at
    ("pathlib._local", "PosixPath"): PurePosixPath,
    **{
        ("torch", str(one).removeprefix("torch.")): one
        for one in vars(torch).values()
        if isinstance(one, torch.dtype)
    },
}
"""(module, name) -> what a table of PyTorch's names."""

_UNBOUNDED = pickle.BYTEARRAY8[0]
"""The opcode that allocates before it reads."""


class _MetadataReader(pickle._Unpickler):
    dispatch = {  # noqa: RUF012 - as its base has it
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != _UNBOUNDED
    }

    def find_class(self, module: str, name: str) -> Any:
        known = KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which no table of tensors does")
        return known


def read_metadata(content: bytes) -> dict[str, Any]:
    """The table as `tensors.json` has it, of values of any type yet, without digests. Raises Exception of
    any kind for what is none."""
    table = _MetadataReader(io.BytesIO(content)).load()
    places = {(index.fqn, tuple(index.offset)): place for index, place in table.storage_data.items()}
    tensors: dict[str, Any] = {}
    for name, one in table.state_dict_metadata.items():
        boxes = []
        for chunk in one.chunks:
            place = places[name, tuple(chunk.offsets)]
            boxes.append(
                [
                    *([*chunk.offsets], [*chunk.sizes]),
                    *(place.relative_path, place.offset, place.length, ""),
                ]
            )
        dtype = str(one.properties.dtype).removeprefix("torch.")
        tensors[name] = {"shape": [*one.size], "dtype": dtype, "boxes": boxes}
    return {"tensors": tensors}

"""Tensors of which a rank holds a part, as PyTorch's distributed checkpoints store them.

A checkpoint knows whole tensors only: a rank writes boxes of them, with their offsets, and reads the boxes
that it needs, whichever boxes were written. So it is free of the layout that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stretto.runtime.shards import Part

Parts = Mapping[str, Part]
"""Name in the checkpoint -> part."""


def _views(parts: Parts) -> dict[tuple[str, torch.Size], torch.Tensor]:
    return {(name, torch.Size(offsets)): view for name, part in parts.items() for offsets, view in part.boxes}


def _chunk(offsets: tuple[int, ...], view: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), view.shape)


class PartsWriter(DefaultSavePlanner):
    """Writes this rank's parts. Ranks that name the same box hold the same values: one of them writes it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._view = _views(parts)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(offsets, view),
                        TensorProperties.create_from_tensor(view),
                        torch.Size(part.full_shape),
                    ),
                )
                for name, part in self._parts.items()
                for offsets, view in part.boxes
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._view[index.fqn, index.offset]

"""PyTorch's table of a checkpoint, read as data: what is no table is refused, and takes no memory."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from stretto.errors import UsageError
from stretto.saving.metadata_adapter import read_metadata
from stretto.saving.table import read_table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    values = {"a": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16), "step": torch.tensor(1)}
    save(values, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_pytorch_writes_is_read(written: Path) -> None:
    found = read_table(written)
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        "a": ((3, 4), "float32"),
        "b": ((2,), "bfloat16"),
        "step": ((), "int64"),
    }


BOMBS = {
    "a bytearray of 8 GiB": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "a place in the memo at 2**31": b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "a frame of 2**40 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"}.",
    "a text of 2**40 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".",
    "deep nesting": b"\x80\x02" + b"(" * 100_000 + b".",
    "the builtin eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "a function of torch": b"ctorch\nload\n(S'x'\ntR.",
    "a class of torch in a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0aSize.mro\x93.",
    "nothing": b"",
    "a number": pickle.dumps(3),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_is_no_table_is_refused_and_takes_no_memory(tmp_path: Path, bomb: str) -> None:
    (tmp_path / ".metadata").write_bytes(BOMBS[bomb])
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"cannot be read \(.*\); take another checkpoint"):
            read_table(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_damage_is_refused_or_changes_nothing_that_crashes(written: Path, tmp_path: Path) -> None:
    draw, content = random.Random(1), (written / ".metadata").read_bytes()
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for _ in range(200):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (tmp_path / ".metadata").write_bytes(damaged)
        try:
            found = read_table(tmp_path)
        except UsageError:
            continue
        assert all(sum(box.nbytes for box in one.boxes) < 10_000 for one in found.values())
    assert read_metadata(content)["tensors"].keys() == {"a", "b", "step"}

"""A full disk is reported as such, also where PyTorch raises an error of its own on the way."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

import pytest
import torch

from stretto.errors import StrettoError
from stretto.saving.folder import Writing

WRITING = Writing("the checkpoint", "save elsewhere", "Nothing is there")
FULL = "the disk is full; free some space, or save"


class Disk(io.BytesIO):
    """A file on a disk that is full after 4 KiB."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_what_torch_save_makes_of_it() -> None:
    with pytest.raises(RuntimeError, match="unexpected pos") as made:
        torch.save(torch.zeros(1 << 18), Disk())
    assert not isinstance(made.value, OSError)
    with pytest.raises(StrettoError, match=FULL), WRITING:
        torch.save(torch.zeros(1 << 18), Disk())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(f"writing a file failed: {os.strerror(errno.ENOSPC)}"), FULL),
        (RuntimeError(f"writing a file failed: {os.strerror(errno.EDQUOT)}"), FULL),
        # A folder of that name.
        (
            PermissionError(errno.EACCES, "Permission denied", "/No space left on device"),
            "Permission denied; see",
        ),
        (RuntimeError("unexpected"), r"unexpected; see to it\. Nothing"),
    ],
)
def test_what_other_failures_are(error: Exception, words: str) -> None:
    with pytest.raises(StrettoError, match=f"could not be written: {words}"), WRITING:
        raise error

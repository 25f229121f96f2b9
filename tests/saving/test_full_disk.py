"""A full disk is told as such, also where PyTorch raises an error of its own on the way."""

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
    with (
        pytest.raises(
            StrettoError, match=r"could not be written: the disk is full; free some space, or save"
        ),
        WRITING,
    ):
        torch.save(torch.zeros(1 << 18), Disk())


def test_a_folder_that_is_called_so_is_not_a_full_disk() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "/mnt/quota/No space left on device")
    with pytest.raises(StrettoError, match="could not be written: Permission denied; see to it"), WRITING:
        raise denied


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_tells_it_in_words_alone(number: int) -> None:
    with pytest.raises(StrettoError, match="the disk is full"), WRITING:
        raise RuntimeError(f"writing a file failed: {os.strerror(number)}")


def test_another_failure_is_not_a_full_disk() -> None:
    with pytest.raises(StrettoError, match=r"could not be written: unexpected; see to it\. Nothing"), WRITING:
        raise RuntimeError("unexpected")

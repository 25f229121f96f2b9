"""Copies in another dtype: the bits and the layout of a copy of each."""

from __future__ import annotations

import torch

from stretto.backend.dispatch_adapter import no_elements, resolve
from stretto.ir.placements import IN_DTYPE


def test_copies_are_those_of_each_tensor() -> None:
    torch.manual_seed(0)
    wide = torch.randn(6, 5, dtype=torch.float32)
    given = [wide, wide.t(), wide[:, 1:3], wide[0, 0], torch.empty(0, 4), wide.view(3, 2, 5).transpose(0, 2)]
    with torch.no_grad():
        made = resolve(IN_DTYPE)([torch.nn.Parameter(one) for one in given], dtype=torch.bfloat16)
    for one, source in zip(made, given, strict=True):
        want = torch.ops.aten._to_copy(source, dtype=torch.bfloat16)
        assert torch.equal(one, want)
        assert (one.stride(), one.dtype) == (want.stride(), want.dtype)
        assert one.data_ptr() != source.data_ptr() or not source.numel()
        assert not one.requires_grad


def test_shapes_are_known_without_elements() -> None:
    with no_elements():
        given = [torch.empty(4, 3), torch.empty(7)]
        made = resolve(IN_DTYPE)(given, dtype=torch.bfloat16)
    assert [(one.shape, one.dtype) for one in made] == [(one.shape, torch.bfloat16) for one in given]

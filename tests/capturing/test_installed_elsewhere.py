"""Libraries that are installed beside this environment (`--system-site-packages`) are no code of
the user's; and what is below a dict of a class of its own is read without its code."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.state import of_library, users_code


class ByModel(dict[str, float]):
    """A registry whose `get` takes something else than a dict's does."""

    def get(self, model: nn.Module) -> float:  # type: ignore[override]
        return super().get(type(model).__name__) or 1.0


REGISTRY = ByModel(Registered=2.0)


class Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * REGISTRY.get(self)


def test_a_dict_with_a_get_of_its_own_is_captured_and_watched() -> None:
    model, x = Registered().double(), torch.randn(4, 4, dtype=torch.float64)

    def loss(model: nn.Module, x: Any) -> Tensor:
        return model(x).square().mean()

    found = stretto.check(model, x, loss, stretto.Parallel(microbatches=2))
    assert max(one.relative for one in found.differences) <= 1e-10


@pytest.mark.parametrize("where", ["lib/python3/site-packages", "usr/lib/python3/dist-packages", "mine"])
def test_what_is_installed_anywhere_is_no_users_code(where: str, tmp_path: Path) -> None:
    file = tmp_path / where / "library.py"
    assert of_library(str(file)) == (where != "mine")
    module = types.ModuleType("a_library")
    module.__file__ = str(file)

    def function() -> None: ...

    function.__module__ = "a_library"
    sys.modules["a_library"] = module
    try:
        assert users_code(function) == (where == "mine")
    finally:
        del sys.modules["a_library"]

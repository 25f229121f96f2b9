"""Backward hooks that only watch are refused: a plan's steps would not call them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook

import stretto
from tests.capturing.zoo import Chain, mean_square, rows


def watched(seen: list[Any], kind: str) -> tuple[nn.Module, Any]:
    """A model with a hook that watches, and its handle."""
    model = Chain()

    def watch(*given: Any) -> None:
        seen.append(given)

    layer = model.get_submodule("layers.1")
    if kind == "module":
        return model, layer.register_full_backward_hook(watch)
    if kind == "module, before":
        return model, layer.register_full_backward_pre_hook(watch)
    if kind == "all modules":
        return model, register_module_full_backward_hook(watch)
    if kind == "all modules, before":
        return model, register_module_full_backward_pre_hook(watch)
    return model, layer.register_forward_hook(lambda _, args, out: out.register_hook(watch) and None)


KINDS = {
    "module": "a backward hook of the module 'layers.1'",
    "module, before": "a backward hook of the module 'layers.1'",
    "all modules": "a backward hook of all modules",
    "all modules, before": "a backward hook of all modules",
    "a value": "a hook on a tensor (register_hook)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_hook_that_only_watches_is_refused(kind: str) -> None:
    seen: list[Any] = []
    model, handle = watched(seen, kind)
    try:
        with pytest.raises(stretto.CaptureError) as caught:
            stretto.capture(model, rows(), mean_square, stretto.Parallel(microbatches=2))
        assert KINDS[kind] in str(caught.value)
        assert "returns nothing, so it only watches" in str(caught.value)
        assert "remove the hook (handle.remove())" in str(caught.value)
        seen.clear()
        mean_square(model, rows()).backward()  # as it was
        assert seen
    finally:
        handle.remove()
    stretto.capture(model, rows(), mean_square, stretto.Parallel(microbatches=2))

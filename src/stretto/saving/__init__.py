"""Saving: a Runner and its optimizer, written by all ranks together, read under any layout."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.saving.face import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: who looks for a checkpoint does not wait for all that a Runner needs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stretto.saving import face

    return getattr(face, name)

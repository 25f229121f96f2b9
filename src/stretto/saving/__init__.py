"""Saving: what a Runner and its optimizer hold, written by all ranks together, read under any layout."""

from stretto.saving.face import load, save

__all__ = ["load", "save"]

"""Saving: what a Runner and its optimizer hold, written by all ranks together and read by any other layout."""

from stretto.saving.face import load, save

__all__ = ["load", "save"]

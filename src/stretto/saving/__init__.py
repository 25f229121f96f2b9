"""Saving: a Runner and its optimizer, written by all ranks together, read under any layout."""

"""Stretto: train large models on many devices, with communication hidden behind computation."""

__version__ = "0.1.0"

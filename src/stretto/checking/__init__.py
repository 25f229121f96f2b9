"""Check: a layout's step against the plain model, and which part of the layout makes the difference."""

from stretto.checking.compare import Check, check

__all__ = ["Check", "check"]

"""Walks a plan with no device: how long a step takes, what stays exposed, and what memory it needs."""

from stretto.simulating.engine import predict, simulate

__all__ = ["predict", "simulate"]

"""Walks a plan with no device: how long a step takes, what stays exposed, and what memory it needs."""

from stretto.simulate.engine import simulate
from stretto.simulate.predict import predict

__all__ = ["predict", "simulate"]

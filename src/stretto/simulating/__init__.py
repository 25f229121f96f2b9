"""Walks a plan with no device: how long a step takes, what stays exposed, and what memory it needs."""

from stretto.simulating.engine import simulate
from stretto.simulating.predict import predict

__all__ = ["predict", "simulate"]

"""Costs: what ops and messages take, measured on this machine or given by a cluster's description."""

from stretto.cost.cluster import Cluster, costs_of

__all__ = ["Cluster", "costs_of"]

"""Orders of ops in a window: what an order must respect, policies that choose one, and their registry.

`register` adds a policy of the user's; `docs/overlap.md` shows how.
"""

from stretto.order.depend import Node, Role, WindowGraph, make_graph
from stretto.order.policies import (
    POLICIES,
    Policy,
    WindowOrders,
    legal_order,
    policy_of,
    register,
    waits_at_once,
)
from stretto.order.storages import WindowStorage
from stretto.order.walk import Replay, replay
from stretto.order.window import improve_order, list_order

__all__ = [
    "POLICIES",
    "Node",
    "Policy",
    "Replay",
    "Role",
    "WindowGraph",
    "WindowOrders",
    "WindowStorage",
    "improve_order",
    "legal_order",
    "list_order",
    "make_graph",
    "policy_of",
    "register",
    "replay",
    "waits_at_once",
]

"""Orders of ops in a window: what must be kept, policies that choose, and the registry of policies.

`register` makes a policy of one's own known; `docs/overlap.md` shows how.
"""

from stretto.order.arrange import Arranger
from stretto.order.at_once import waits_at_once
from stretto.order.depend import NOTHING, Node, Outside, Role, WindowGraph, make_graph
from stretto.order.exact import exact_order
from stretto.order.follow import Replay, replay
from stretto.order.policies import POLICIES, Policy, legal_order, policy_of, register
from stretto.order.storages import Storage
from stretto.order.window import improve_order, list_order

__all__ = [
    "NOTHING",
    "POLICIES",
    "Arranger",
    "Node",
    "Outside",
    "Policy",
    "Replay",
    "Role",
    "Storage",
    "WindowGraph",
    "exact_order",
    "improve_order",
    "legal_order",
    "list_order",
    "make_graph",
    "policy_of",
    "register",
    "replay",
    "waits_at_once",
]

"""Orders of ops in a window: what must be kept, policies that choose, and the registry of policies.

`register` makes a policy of one's own known; `docs/overlap.md` shows how.
"""

from stretto.schedule.order.arrange import Arranger
from stretto.schedule.order.at_once import waits_at_once
from stretto.schedule.order.depend import NOTHING, Node, Outside, Role, WindowGraph, make_graph
from stretto.schedule.order.exact import exact_order
from stretto.schedule.order.improve import improve_order
from stretto.schedule.order.listing import list_order
from stretto.schedule.order.policies import POLICIES, Policy, legal_order, policy_of, register
from stretto.schedule.order.replay import Replay, replay
from stretto.schedule.order.storages import Storage

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

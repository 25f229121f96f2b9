"""Orders of ops in a window: what an order must respect, policies that choose one, and their registry.

`register` adds a policy of the user's; `docs/overlap.md` shows how.
"""

from stretto.order.policies import register
from stretto.order.walk import replay

__all__ = ["register", "replay"]

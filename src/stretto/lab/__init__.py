"""An emulated cluster on one machine: hosts in network namespaces, links of a chosen rate, quotas.

The public face of the room; it touches the kernel through iproute2 and control groups, and needs root.
"""

from stretto.lab.cluster import Lab
from stretto.lab.commands import Statuses

__all__ = ["Lab", "Statuses"]

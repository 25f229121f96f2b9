"""The most of what is counted: numbers of files and options are checked against these before they are used.

All are above what exists, and small enough that what is made of them fits a laptop's memory.
"""

from __future__ import annotations

MOST_RANKS = 2**20
"""Of a run, a mesh, a cluster. Assumed: ten times the largest clusters that are trained on."""
MOST_STAGES = 2**16
MOST_MICROBATCHES = 2**20
MOST_ACTIONS = 2**20
"""Stages times microbatches of a schedule that is made; each makes two or three actions of 200 bytes."""
MOST_RESHARDED = 2**14
"""Devices of a mesh that a tensor is resharded from or to, whose boxes are all listed."""
MOST_LAYERS = 2**12
"""Blocks of a model, each of which is made of modules before it is captured."""

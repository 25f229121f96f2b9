"""The table of Megatron-LM's and MindSpeed's flags (`row.Flag`), by name.

Names, arities and defaults are those of Megatron-LM's megatron/training/arguments.py and of MindSpeed's
mindspeed/arguments.py and features_manager.
"""

from __future__ import annotations

from stretto.convert.flags_taken import EXPERTS, LAYOUT, MODEL, TRAINING
from stretto.convert.flags_untaken import LACKING, NOT_NEEDED, REFUSED
from stretto.convert.row import Flag

ROWS = (*MODEL, *EXPERTS, *LAYOUT, *TRAINING, *NOT_NEEDED, *LACKING, *REFUSED)
TABLE: dict[str, Flag] = {row.name: row for row in ROWS}

ALIASES = {
    "--persistent-save-interval": "--save-interval",
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
}
"""Older names of the same flags."""

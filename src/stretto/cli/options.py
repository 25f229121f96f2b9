"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Measure and plan anew, whatever earlier runs kept; as --set planning.reuse=renew."
    ),
]
RENEW = "planning.reuse=renew"
"""What it sets."""

Edited = Annotated[
    bool,
    typer.Option(
        "--edited",
        help="The plan's programs were edited on purpose. What can be proved of them still is.",
    ),
]

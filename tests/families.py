"""Names of the schedule families, by how many stages a rank has."""

from __future__ import annotations

from stretto.ir.stage_maps import STAGE_MAPS

ONE_STAGE = tuple(name for name, places in STAGE_MAPS.items() if places.most == 1)
SEVERAL = tuple(name for name in STAGE_MAPS if name not in ONE_STAGE)

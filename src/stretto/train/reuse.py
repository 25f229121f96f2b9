"""Where a run finds costs and plans of earlier ones: a folder of the user's cache, if it may look."""

from __future__ import annotations

import os
from typing import get_args

from stretto.config import PlanningSettings, TrainSettings
from stretto.errors import UsageError
from stretto.files.kept import Kept, cache_dir
from stretto.files.say import Say, unheard

REUSE = "STRETTO_REUSE"
"""Environment variable: comes before the setting `planning.reuse`; "auto" only before "off"."""


def kept_by(settings: TrainSettings, say: Say = unheard) -> Kept | None:
    """Costs and plans of earlier runs; None where that is switched off, or there is no folder. say: as `Kept`
    has it.

    Raises UsageError for a variable that is none of the setting's values.
    """
    known = get_args(PlanningSettings.model_fields["reuse"].annotation)
    setting = settings.planning.reuse
    wish = os.environ.get(REUSE) or setting
    if wish not in known:
        raise UsageError(f"{REUSE} = {wish!r} in the environment: choose one of {', '.join(known)}")
    if wish == "off":
        return None
    renew = "renew" in (wish, setting)  # what --fresh asks for is done
    try:
        return Kept(cache_dir() / "kept", renew, say)
    except UsageError as error:
        say(f"note: costs and plan are not kept for the next run: {error}")
        return None

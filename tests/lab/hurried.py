"""A rank that neither measures its machine nor waits long for a file of another host.

hurried.py train CONFIG      the command
hurried.py PROGRAM ...       a program
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from stretto.cli.main import main
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.planning import make_plan as planning
from stretto.saving import folder
from tests.clusters import cores

_plan = planning.plan


def described(job: Job, *_: Any, **__: Any) -> Plan:
    """As `stretto.plan`, for a machine that nobody looks at."""
    return _plan(job, cores())


if __name__ == "__main__":
    planning.plan = described  # type: ignore[assignment]
    folder.SEEN_WITHIN_S = 0.5
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "train":
        sys.argv.insert(0, "stretto")
        main()
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")

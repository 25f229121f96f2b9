"""Settings of all tests: in continuous integration, property tests draw the same examples every time.

Elsewhere they draw new ones, so that every run on a desk looks further.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("repeatable")

"""The words of the house: actions, ops, programs, plans, and their text forms. Imports nothing above it."""

import stretto.ir.serialize  # noqa: F401  (a plan that is made can be saved)

"""Races against other systems, and checks of plans and of the cost model: `python -m benchmarks NAME`.

Run from a checkout; not part of the installed package.
"""

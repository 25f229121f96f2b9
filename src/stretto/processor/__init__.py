"""Processors that others share, by quotas or as neighbours on a core: how that is measured, and what a clock
and a bound make of it.

What a plan says of them is `stretto.ir.costs`. Accelerators have none of it.
"""

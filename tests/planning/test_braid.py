"""STP's table (NeurIPS 2025): all-reduces that a pipeline waits for, and that windows hide at least as many."""

from __future__ import annotations

import pytest
from benchmarks.braid import FAMILIES, Table, exposed_us, planned

from stretto.ir.program import OverlapMode
from stretto.simulate import simulate

TABLES = [Table(p, m, reduce_us) for p, m in ((2, 8), (4, 16), (8, 32)) for reduce_us in (20.0, 50.0, 100.0)]


@pytest.mark.parametrize("table", TABLES)
def test_the_others_wait_for_as_much_as_the_table_says(table: Table) -> None:
    """Interleaved 1F1B with backwards' all-reduces under weight gradients, ZB-V with none."""
    kinds: list[tuple[str, OverlapMode, float]] = [
        ("interleaved-1f1b", "local", table.interleaved_us),
        ("interleaved-1f1b", "off", table.zb_v_us),
        ("zb-v", "off", table.zb_v_us),
    ]
    for family, overlap, us in kinds:
        assert exposed_us(planned(table, family, overlap)) == pytest.approx(us)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("table", TABLES)
def test_windows_wait_for_no_more_than_the_braid(table: Table, family: str) -> None:
    plan = planned(table, family, "window")
    assert exposed_us(plan) <= table.braid_us
    assert simulate(plan).step_us <= table.braid_step_us

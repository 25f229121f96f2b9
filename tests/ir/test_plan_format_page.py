"""docs/plan-format.md shows a plan that this code reads, proves and writes, byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path

from stretto.ir import program
from stretto.ir.collectives import IN_PROGRAMS
from stretto.ir.plan import VERSION
from stretto.ir.program import CHUNK, INDEX, WAIT
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.verifying import verify
from stretto.verifying.messages import message_faults
from tests.verifying.edits import order

PAGE = (Path(__file__).parents[2] / "docs" / "plan-format.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
FULL = BLOCKS[-1]


def test_the_example_is_a_plan_without_faults() -> None:
    plan = plan_from_text(FULL)
    verify(plan)
    assert plan_to_text(plan) == FULL


def test_excerpts_are_from_the_example() -> None:
    lines = {line.strip() for line in FULL.splitlines()}
    assert len(BLOCKS) > 5
    for block in BLOCKS[:-1]:
        for line in block.splitlines():
            assert line.strip() in lines


def test_every_key_is_explained() -> None:
    table = PAGE.split("## Ops")[0]
    assert f'`"stretto-plan"`, `{VERSION}`.' in table
    for key in json.loads(FULL):
        assert f"`{key}`" in table


def test_every_key_of_the_job_is_explained() -> None:
    table = PAGE.split("## The job")[1].split("```json")[0]
    for key in json.loads(FULL)["job"]:
        assert f"`{key}`" in table, key


def test_every_op_that_communicates_is_explained() -> None:
    for target in [kind.target for kind in IN_PROGRAMS] + [WAIT, INDEX, CHUNK]:
        assert f"| `{target}(" in PAGE
        assert f"    {target}(" in str(program.__doc__)


def test_the_fault_that_is_shown() -> None:
    dropped = order(0, "recv e1:1; ", "")(plan_from_text(FULL))
    assert f"  {message_faults(dropped)[0]}\n" in PAGE

"""The plan and the table of docs/zero.md, made of plans: `python -m tests.zero_page` writes them again."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import torch

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule
from stretto.price.cluster import describe, described

PAGE = Path(__file__).parents[1] / "docs" / "zero.md"
CLUSTER, DP = "a100-80gbx8", 4
BEGIN, END = "<!-- made by tests/zero_page.py -->\n", "<!-- until here -->"

Kind = Literal["float32", "bf16"]


@cache
def job_of(zero: Literal[0, 1, 2, 3, "auto"], precision: Kind) -> Job:
    """Of a GPT with 60 million parameters."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=16384, layers=2, hidden=1024, heads=16, context=128))
    batch = torch.zeros(2 * DP, 129, dtype=torch.int64)
    parallel = Parallel(dp=DP, zero=zero, microbatches=2)
    return capture(model, batch, next_token_loss, parallel, precision=precision)


def least_of(job: Job) -> Plan:
    """With no limit of memory, so that nothing stays in full for longer than `zero` says."""
    cluster = describe(CLUSTER)
    assert cluster is not None
    return make_plan(job, described(job, choose_schedule(job), cluster)[0], order="list")


def plan_of(zero: Literal[1, 3, "auto"]) -> str:
    return str(stretto.plan(job_of(zero, "bf16"), CLUSTER, order="list"))


def rows() -> list[tuple[str, ...]]:
    """Kind, zero, part, and its bytes by the textbook and by the plan."""
    found = []
    for precision in ("float32", "bf16"):
        for zero in (0, 1, 2, 3):
            plan = least_of(job_of(zero, precision))
            assert plan.prediction is not None
            count = sum(parameter.spec.numel for parameter in plan.job.parameters)
            copy, dealt = (2 if precision == "bf16" else 4 * (zero > 0)), DP if zero else 1
            textbook = {
                "parameters": ((0 if zero == 3 else copy) + 4 / dealt) * count,
                "gradients": 4 / (DP if zero > 1 else 1) * count,
                "optimizer": 8 / dealt * count,
            }
            for part, nbytes in textbook.items():
                said = plan.prediction.memory[part][0]
                found.append((precision, str(zero), part, f"{nbytes / 1e6:.0f}", f"{said / 1e6:.0f}"))
    return found


def made() -> str:
    """What the page shows between its marks."""
    table = ["| precision | zero | part | textbook MB | plan MB |", "| --- | --- | --- | --- | --- |"]
    table += [f"| {' | '.join(row)} |" for row in rows()]
    lines = [
        line for zero in (3, "auto") for line in plan_of(zero).splitlines() if line.startswith("  zero ")
    ]
    return "\n".join(
        ["```", plan_of(1), "```", "", "With 3 and with auto:", "", "```", *lines, "```", "", *table, ""]
    )


def shown(text: str) -> str:
    return text.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(BEGIN + shown(text), BEGIN + made()), encoding="utf-8")

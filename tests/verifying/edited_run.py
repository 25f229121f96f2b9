"""Edits plan files at random, and says what becomes of each: refused, the same step, another, or a crash.

    python -m tests.verifying.edited_run 2200      # over all plans; says figures by kind of edit

Edits run in child processes, so that a kernel that dies is seen. Each is done twice: read as any
file is, which must refuse it, and read as one that was edited on purpose, proved, and run on threads.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.ir.plan import Plan
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.models.gpt import next_token_loss
from stretto.runtime import run_threads
from stretto.verifying import verify
from tests.capturing import zoo
from tests.clusters import cores
from tests.runtime.equality import batch_of, gpt
from tests.verifying.job_edits import EDITS, FREE

SAME = 1e-9
"""The largest relative difference of what is the same step, computed in float64."""

SECONDS = 120
"""No edit takes longer, unless it hangs."""

KILLED = "killed the child"
"""In the place of an edit's name, of one that cannot be asked any more."""

STYLES = {"layers.0": "colwise", "layers.1": "rowwise", "layers.2": "colwise", "layers.3": "rowwise"}


Loss = Callable[[nn.Module, Any], Tensor]
Made = tuple[nn.Module, Any, Loss, stretto.Parallel]


def _zoo(name: str, **wishes: Any) -> Made:
    wishes = {"pp": 2, "microbatches": 2, **wishes}
    return getattr(zoo, name)(), zoo.rows(8), zoo.mean_square, stretto.Parallel(**wishes)


def counted(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that is a sum, and what it counts."""
    return model(batch).square().sum(), (batch > 0).sum()


MADE: dict[str, Callable[[], Made]] = {
    "chain": lambda: _zoo("Chain"),
    "tensor parallel": lambda: _zoo("Chain", tp=2, tp_plan=STYLES),
    "batch norm": lambda: _zoo("BatchNorm", recompute="full"),
    "convolutions": lambda: _zoo("Convolutions", dp=2, pp=1),
    "encoder": lambda: _zoo("Encoder", schedule="zb-h1"),
    "dropout": lambda: _zoo("Dropout", recompute="full"),
    "constants": lambda: _zoo("Constants"),
    "counted": lambda: (zoo.Chain(), zoo.rows(8), counted, stretto.Parallel(pp=2, microbatches=2)),
    "sorts": lambda: _zoo("Sorts"),
    "masked": lambda: _zoo("Masked"),
    "views": lambda: _zoo("ViewOfAView"),
    "gpt": lambda: (
        gpt(True, layers=2).double(),
        batch_of("gpt", 4),
        next_token_loss,
        stretto.Parallel(pp=2, tp=2, microbatches=2),
    ),
}


Results = list[dict[str, Tensor]]
"""By rank: the loss and all gradients that it has."""


def run(plan: Plan, model: nn.Module, batch: Any) -> Results:
    """The plan's step, on ranks that are threads."""

    def work(runner: stretto.Runner) -> dict[str, Tensor]:
        loss = runner.step(batch)
        grads = {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}
        return {"the loss": loss, **grads}

    return run_threads(plan, lambda _: copy.deepcopy(model), work)


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """The largest relative difference, norm-wise, and of what it is."""
    worst = [(0.0, "nothing")]
    for rank, (have, want) in enumerate(zip(found, expected, strict=True)):
        if have.keys() != want.keys():
            return math.inf, f"rank {rank}: {sorted(have.keys() ^ want.keys())}"
        for name, tensor in want.items():
            off = float((have[name] - tensor).norm() / tensor.norm().clamp_min(1e-12))
            worst.append((off if off == off else math.inf, f"{name} of rank {rank}"))
    return max(worst)


@dataclass
class Case:
    """A plan, as its file's data, and what its step gives."""

    model: nn.Module
    batch: Any
    data: dict[str, Any]
    expected: Results


def case_of(name: str) -> Case:
    model, batch, loss, parallel = MADE[name]()
    job = stretto.capture(model, batch, loss, parallel)
    plan = stretto.plan(job, cores(), order="list")
    return Case(model, batch, json.loads(plan_to_text(plan)), run(plan, model, batch))


def outcome(case: Case, seed: int) -> dict[str, str]:
    """What becomes of the edit of that number."""
    chance = Random(seed)
    first, data, what = chance.randrange(len(EDITS)), copy.deepcopy(case.data), ""
    for step in range(len(EDITS)):  # a plan has no place for some
        edit = EDITS[(first + step) % len(EDITS)]
        what = what or edit(data, chance)
        if what:
            break
    found = {"edit": edit.__name__, "what": what, "default": "", "declared": "", "why": ""}
    if not what or data == case.data:
        return {**found, "default": "none", "declared": "none"}
    text = json.dumps(data)
    try:
        plan_from_text(text)
        found["default"] = "same" if data["job"] == case.data["job"] else "read"
    except stretto.StrettoError:
        found["default"] = "refused"
    except Exception as error:
        found["default"] = f"crash: {type(error).__name__}: {error}"
    try:
        plan = plan_from_text(text, edited=True)
        verify(plan)
        found["declared"] = "proved"
        error, where = difference(run(plan, case.model, case.batch), case.expected)
        found.update(declared="same" if error <= SAME else "differs", why=f"{where} by {error:.1e}")
    except stretto.StrettoError as error:
        found.update(declared="stopped" if found["declared"] else "refused", why=str(error))
    except Exception as error:
        found.update(declared="crash", why=f"{type(error).__name__}: {error}")
    return found


def child(name: str, seeds: list[int]) -> None:
    case = case_of(name)
    for seed in seeds:
        print(json.dumps({"begin": seed}), flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        found = outcome(case, seed)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"seed": seed, "plan": name, **found}), flush=True)


def outcomes(name: str, seeds: list[int]) -> Iterator[dict[str, str]]:
    """What becomes of these edits, in a child that is started again behind one that kills it."""
    left = list(seeds)
    while left:
        command = [sys.executable, "-m", "tests.verifying.edited_run", name, *map(str, left)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            begun = None
            for line in process.stdout:
                said = json.loads(line)
                if "begin" in said:
                    begun = said["begin"]
                else:
                    left.remove(said["seed"])
                    yield said
        if process.returncode:
            assert begun is not None, f"{name}: no plan was made"
            why = f"status {process.returncode}"
            left.remove(begun)
            yield {
                "seed": str(begun),
                "plan": name,
                "edit": KILLED,
                "what": "",
                "why": why,
                "default": "",
                "declared": "crash",
            }


def wrong(found: dict[str, str]) -> bool:
    """Whether what became of an edit is a fault: a crash, a file that was read as it is, or another step that
    could have been proved to be another."""
    read = found["default"] not in ("refused", "same", "none", "")
    differs = found["declared"] == "differs" and found["edit"] not in FREE
    return read or found["declared"] in ("crash", "proved") or differs


def main(count: int) -> int:
    """All plans, so many edits; says figures by kind of edit, and each fault. Returns how many faults."""
    tally: dict[str, Counter[str]] = {name: Counter() for name in (*(e.__name__ for e in EDITS), KILLED)}
    names = list(MADE)
    faults = 0
    for at, name in enumerate(names):
        for found in outcomes(name, list(range(at, count, len(names)))):
            tally[found["edit"]][found["declared"]] += 1
            tally[found["edit"]][f"default {found['default'][:7]}"] += 1
            if wrong(found) or found["declared"] == "differs":
                faults += wrong(found)
                print("FAULT" if wrong(found) else "free", json.dumps(found), flush=True)
    for name, counts in tally.items():
        print(f"{name:18}", dict(sorted(counts.items())))
    print("all", dict(sorted(sum(tally.values(), Counter()).items())), "faults", faults)
    return faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        main(int(sys.argv[1]))
    else:
        child(sys.argv[1], list(map(int, sys.argv[2:])))

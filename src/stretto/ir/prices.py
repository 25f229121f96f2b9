"""Prices: what an op takes by what it is, and the price list of a job from them.

A price follows from an op's target and its arguments, and from shapes, dtypes and layout of what it reads; in
which stage the op is and what it is called do not matter. So a pass that makes an op never prices it: the
list of the job that a pass gives is filled here, in one place. Who prices is for `stretto.price`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.collectives import Collective
from stretto.ir.costs import Costs
from stretto.ir.flow import given_specs
from stretto.ir.program import WAIT, Arg, Const, Job, Op, Ref, Stage, TensorSpec
from stretto.ir.updates import UPDATE, update_bytes

Specs = Mapping[str, TensorSpec]
"""Value name -> spec, for values that are one tensor."""

FREE = "free"
"""How the price of an op is known that takes no time of its own."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A time in microseconds, and in a word how it is known: "" where the source of the costs says it."""

    us: float
    how: str = ""


class Pricer(ABC):
    """Prices ops by what they are."""

    @abstractmethod
    def price(self, op: Op, specs: Specs) -> Priced:
        """The op's time on the compute lane; for an op that starts a collective, what starting it takes."""

    def finish_us(self, asked: Collective) -> float:
        """What is left to do on the compute lane when a collective is waited for that is done."""
        return 0.0

    def run_us(self, ops: Sequence[Op], alone_us: Sequence[float]) -> Sequence[float]:
        """What a program's ops take one after the other, from what each takes alone."""
        return alone_us


class Prices:
    """The price lists of a job and of what passes make of it."""

    def __init__(self, job: Job, costs: Costs, pricer: Pricer, *, keep: bool) -> None:
        """costs: those of `job`. keep: ops of `job` have the times that `costs` lists, and the pricer prices
        what is new; else it prices all."""
        self._job = job
        self._costs = costs
        self._pricer = pricer
        self._keep = keep
        self._seen: dict[int, tuple[Op, Priced]] = {}
        self._lists: dict[int, tuple[Job, Costs]] = {id(job): (job, costs)}

    def us(self, op: Op, specs: Specs) -> float:
        """The price of an op that no job has yet."""
        return self._pricer.price(op, specs).us

    def costs_of(self, job: Job) -> Costs:
        """The costs with the price list of `job`."""
        if id(job) not in self._lists:
            kept = self._kept(job) if self._keep else set()
            listed = price_list(job, self._pricer, self._seen, kept)
            known_us, known_how = self._costs.op_us, self._costs.op_how
            times = {key: known_us[key] for key in kept if key in known_us}
            times |= {key: priced.us for key, priced in listed.items()}
            how = {key: known_how[key] for key in kept if key in known_how}
            how |= {key: priced.how for key, priced in listed.items() if priced.how not in ("", FREE)}
            self._lists[id(job)] = job, replace(self._costs, op_us=times, op_how=how)
        return self._lists[id(job)][1]

    def _kept(self, job: Job) -> set[tuple[int, str]]:
        """Ops that are what they were, whatever what they read is called now."""
        was, now = specs_of(self._job), specs_of(job)
        first = {(stage, op.name): op for stage, op in self._job.all_ops}
        result = set()
        for stage, op in job.all_ops:
            old = first.get((stage, op.name))
            if old is op or (old is not None and signature(old, was) == signature(op, now)):
                result.add((stage, op.name))
        return result


def price_list(
    job: Job,
    pricer: Pricer,
    seen: dict[int, tuple[Op, Priced]] | None = None,
    but: Collection[tuple[int, str]] = (),
) -> dict[tuple[int, str], Priced]:
    """(stage, op name) -> its price, for all ops of a job but those named.

    seen: prices of ops that were met before, by the ops' ids; grows.
    """
    seen = {} if seen is None else seen
    specs = specs_of(job)
    result: dict[tuple[int, str], Priced] = {}
    for stage in job.stages:
        asked = {op.name: op.collective for op in stage.all_ops}
        for full in stage.ops.values():
            ops = [op for op in full if (stage.index, op.name) not in but]
            alone: list[Priced] = []
            for op in ops:
                collective = asked.get(op.uses[0]) if op.target == WAIT else None
                if collective is not None:
                    alone.append(Priced(pricer.finish_us(collective), FREE))
                    continue
                if id(op) not in seen:
                    seen[id(op)] = op, pricer.price(op, specs)
                specs.update(op.written)
                alone.append(seen[id(op)][1])
            times = pricer.run_us(ops, [priced.us for priced in alone])
            for op, priced, us in zip(ops, alone, times, strict=True):
                result[stage.index, op.name] = priced if us == priced.us else Priced(us, priced.how)
    return result


def specs_of(job: Job) -> dict[str, TensorSpec]:
    """Value name -> spec, for every value of the step that is one tensor."""
    return given_specs(job) | {op.name: op.spec for _, op in job.all_ops if op.spec is not None}


def specs_within(job: Job, stage: Stage) -> dict[str, TensorSpec]:
    """The same of what one stage reads and makes."""
    received = {edge.value: edge.spec for edge in job.edges if edge.target == stage.index}
    return given_specs(job) | received | {op.name: op.spec for op in stage.all_ops if op.spec is not None}


def signature(op: Op, specs: Specs) -> str:
    """What an op is, as the key of its price: `aten.mm.default(float32[64,128], float32[128,512]{1,128})`.

    specs: value name -> shape; a value that is no single tensor is written `?`.
    """

    def text(arg: Arg) -> str:
        if isinstance(arg, Ref):
            return str(specs.get(arg.name, "?"))
        if isinstance(arg, Const):
            return f"{arg.kind}:{arg.text}"
        if isinstance(arg, tuple):
            return f"[{', '.join(map(text, arg))}]"
        return repr(arg)

    arguments = [text(arg) for arg in op.args] + [f"{key}={text(arg)}" for key, arg in op.kwargs]
    return f"{op.target}({', '.join(arguments)})"


def made_bytes(op: Op) -> int:
    """Bytes of all results, views included: what a reader of the value reads."""
    return sum(spec.nbytes for spec in op.outputs if spec is not None)


def traffic_bytes(op: Op, specs: Specs) -> int:
    """Bytes that an op reads and writes, each value once; of an update what it changes twice."""
    if op.target == UPDATE:
        return update_bytes(op, specs)
    return made_bytes(op) + sum(specs[name].nbytes for name in op.uses if name in specs)

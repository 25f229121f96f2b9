"""A gradient that is a sum of products becomes these products, each a part of the gradient.

A matrix that is used several times, as by chunks of a sequence or slices of what experts get, has a product
for each use, and the captured step adds them up: each sum writes and reads tensors of the parameter's size.
The runtime adds the parts of a gradient where it is kept in any case, and a product while it is multiplied
(`stretto.ir.storage`): then nothing is left of the sums.

    1. A gradient that an addition makes, of two tensors of its shape and dtype, is taken apart, and so is
       what it adds, as long as nothing else reads it.
    2. Where all that is left are products that nothing else reads, they are the gradient's parts, in the
       order in which they are made; the additions are gone. Else the sum stays.

Sums are regrouped: over microbatches each part is added by itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.program import Job, Op, Parameter, Ref
from stretto.ir.storage import PRODUCTS

ADD = "aten.add.Tensor"

Made = tuple[int, Phase, str]
"""(stage, phase, value), as `Parameter.grads` has it."""


def gradient_parts(job: Job) -> Job:
    """See the module. The job itself when no gradient is such a sum."""
    work = _GradientSums(job)
    parameters = tuple(work.apart(parameter) for parameter in job.parameters)
    if not work.gone:
        return job
    stages = tuple(
        replace(
            stage,
            ops={
                phase: tuple(op for op in ops if (stage.index, op.name) not in work.gone)
                for phase, ops in stage.ops.items()
            },
        )
        for stage in job.stages
    )
    return replace(job, parameters=parameters, stages=stages)


class _GradientSums:
    """gone: (stage, name) of additions that are no more."""

    def __init__(self, job: Job) -> None:
        self.gone: set[tuple[int, str]] = set()
        self._made: dict[tuple[int, str], tuple[int, Phase, Op]] = {}
        self._uses: Counter[str] = Counter()
        for stage in job.stages:
            for phase in PHASES:
                for at, op in enumerate(stage.ops[phase]):
                    self._made[stage.index, op.name] = at, phase, op
                    self._uses.update(op.uses)
        self._uses.update(value for p in job.parameters for _, _, value in p.grads)
        self._uses.update(value for b in job.buffers for _, _, value in b.updates)
        self._uses.update(edge.value for edge in job.edges)
        self._uses[job.loss[1]] += 1

    def apart(self, parameter: Parameter) -> Parameter:
        """Steps 1 and 2 for the gradient of a parameter."""
        parts: list[Made] = []
        for grad in parameter.grads:
            stage, _, value = grad
            sums: list[str] = []
            result = self._products(stage, value, sums)
            if result is None or not sums:
                parts.append(grad)
                continue
            self.gone |= {(stage, name) for name in sums}
            order = sorted(
                (PHASES.index(self._made[stage, name][1]), self._made[stage, name][0], name)
                for name in result
            )
            parts += [(stage, PHASES[phase], name) for phase, _, name in order]
        return replace(parameter, grads=tuple(parts))

    def _products(self, stage: int, value: str, sums: list[str]) -> list[str] | None:
        """The products of which a value is the sum; None where it is anything else. sums: gets the
        additions."""
        if (stage, value) not in self._made or self._uses[value] != 1:
            return None
        _, _, op = self._made[stage, value]
        if op.target in PRODUCTS:
            return [value]
        if op.target != ADD or op.kwargs or not all(isinstance(arg, Ref) for arg in op.args):
            return None
        sums.append(value)
        result: list[str] = []
        for arg in op.args:
            inner = self._products(stage, arg.name, sums)
            if inner is None or self._made[stage, arg.name][2].outputs != op.outputs:
                return None
            result += inner
        return result

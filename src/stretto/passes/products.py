"""Products: batched ones that are plain ones, and gradients that are sums of products.

`plain_matmuls`: a product of a batch of one, with one matrix for all, or summed, is one plain product. A
linear layer that is written with three dims (einsum, matmul of expanded weights) multiplies batch by batch,
and makes its weight's gradient as a batch of gradients that is then summed. One product of all rows does the
same, without the batch of gradients, and is one op that can be under the input gradient's communication.

    1. sum over b of A[b] B[b] is [A[0] A[1] ...] times [B[0]; B[1]; ...], where the layouts make both views.
    2. A[b] W for all b is the product of A's rows, one below the other, and W.
    3. A batch of one is a plain product. Not where it is a rank's own of a batch that ranks share (a head
       of attention): what a dim that is gone was sharded along no one could show.

Sums are regrouped: results differ in the last bits.

`gradient_parts`: a matrix that is used several times, as by chunks of a sequence, has a product for each use,
and the captured step adds them up: each sum writes and reads tensors of the parameter's size. The runtime
adds parts of a gradient where it is kept anyway (`stretto.ir.storage`), so the products become the
gradient's parts.

    1. A gradient that an addition makes, of two tensors of its shape and dtype, is taken apart, and so is
       what it adds, as long as nothing else reads it.
    2. Where all that is left are products that nothing else reads, they are the gradient's parts, in the
       order in which they are made. Else the sum stays. Over microbatches each part is added by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.program import VIEW, Job, Op, Parameter, Ref, Stage, TensorSpec
from stretto.ir.storage import PRODUCTS
from stretto.passes.layout.program import Origin, StepProgram
from stretto.passes.no_ops import live_ops, specs_in
from stretto.passes.rewrite import changed, spec_with, strides_of, users_of

BMM, SQUEEZE = "aten.bmm.default", "aten.squeeze.dim"


def plain_matmuls(program: StepProgram, sharded: Collection[str]) -> StepProgram:
    """See the module."""
    specs, users = specs_in(program), users_of(op for op, _ in program.ops)
    products = {op.name: op for op, _ in program.ops if op.target == BMM}
    single = {name for name in products if len(users[name]) == 1} - {*program.roots.values()}
    ops: list[tuple[Op, Origin]] = []
    for op, origin in program.ops:
        new: list[Op] | None = None
        if op.target == BMM:
            shares = any(ref.name in sharded for ref in op.args)
            new = _shared(op, specs) or (None if shares else _single(op, specs))
        elif op.target == "aten.sum.dim_IntList" and op.args[0].name in single:
            new = _summed(op, products[op.args[0].name], specs)
        ops += [(made, origin) for made in new or [op]]
    return program if len(ops) == len(program.ops) else live_ops(program.with_ops(ops, str))


def _summed(op: Op, product: Op, specs: Mapping[str, TensorSpec]) -> list[Op] | None:
    """Step 1: a view of [m, batch, k] as [m, batch * k], and of [batch, k, n] as [batch * k, n]."""
    left, right = (specs.get(ref.name) for ref in product.args)
    if left is None or right is None or tuple(op.args[1]) != (0,) or op.kwargs:
        return None
    (batch, m, k), n = left.shape, right.shape[2]
    across, down, along = strides_of(left)
    over, step, beside = strides_of(right)
    if across != k * along or over != k * step:
        return None
    make = _PlainMatmuls(op, left.dtype)
    swapped = make.view(
        "swapped", "aten.permute.default", product.args[0], ((1, 0, 2),), (m, batch, k), (down, across, along)
    )
    a = make.view("left", VIEW, swapped, ((m, batch * k),), (m, batch * k), (down, along))
    b = make.view("right", VIEW, product.args[1], ((batch * k, n),), (batch * k, n), (step, beside))
    return make.product(a, b, (m, n), product.flops)


def _shared(op: Op, specs: Mapping[str, TensorSpec]) -> list[Op] | None:
    """Step 2: the second matrix is expanded from one."""
    left, right = (specs.get(ref.name) for ref in op.args)
    if left is None or right is None or left.stride is not None or strides_of(right)[0] != 0:
        return None
    (batch, m, k), n = left.shape, right.shape[2]
    make = _PlainMatmuls(op, left.dtype)
    a = make.view("left", VIEW, op.args[0], ((batch * m, k),), (batch * m, k), (k, 1))
    b = make.view("right", "aten.select.int", op.args[1], (0, 0), (k, n), strides_of(right)[1:])
    return make.product(a, b, (batch * m, n), op.flops)


def _single(op: Op, specs: Mapping[str, TensorSpec]) -> list[Op] | None:
    """Step 3."""
    left, right = (specs.get(ref.name) for ref in op.args)
    if left is None or right is None or left.shape[0] != 1:
        return None
    make = _PlainMatmuls(op, left.dtype)
    a = make.view("left", SQUEEZE, op.args[0], (0,), left.shape[1:], strides_of(left)[1:])
    b = make.view("right", SQUEEZE, op.args[1], (0,), right.shape[1:], strides_of(right)[1:])
    return make.product(a, b, (left.shape[1], right.shape[2]), op.flops)


@dataclass(slots=True)
class _PlainMatmuls:
    """The ops that take an op's place, the last of which has its name."""

    op: Op
    dtype: str
    ops: list[Op] = field(default_factory=list)

    def view(
        self,
        what: str,
        target: str,
        source: Ref,
        args: tuple[object, ...],
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> Ref:
        name, spec = f"{self.op.name}_{what}", spec_with(shape, self.dtype, strides)
        made = Op(name, target, (source, *args), (), (spec,), source.name, module=self.op.module)
        self.ops.append(made)
        return Ref(name)

    def product(self, a: Ref, b: Ref, shape: tuple[int, int], flops: int) -> list[Op]:
        """The product, seen as the result that the op had."""
        op, plain = self.op, TensorSpec(shape, self.dtype)
        as_it_is = op.outputs[0] == plain
        name = op.name if as_it_is else f"{op.name}_mm"
        made = Op(name, "aten.mm.default", (a, b), (), (plain,), flops=flops, module=op.module)
        self.ops.append(made)
        if not as_it_is:
            args = Ref(name), op.made.shape
            self.ops.append(Op(op.name, VIEW, args, (), op.outputs, name, module=op.module))
        return self.ops


ADD = "aten.add.Tensor"

Made = tuple[int, Phase, str]
"""(stage, phase, value), as `Parameter.grads` has it."""


def gradient_parts(job: Job) -> Job:
    """See the module. The job itself when no gradient is such a sum."""
    work = _GradientSums(job)
    parameters = tuple(work.apart(parameter) for parameter in job.parameters)
    if not work.gone:
        return job

    def kept(stage: Stage) -> Stage:
        return changed(stage, lambda op: () if (stage.index, op.name) in work.gone else (op,))

    return replace(job, parameters=parameters, stages=tuple(map(kept, job.stages)))


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

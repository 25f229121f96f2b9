"""A training step of a transformer by formula: from sizes and a layout to microseconds, with no model.

Two things: Megatron's count of arithmetic, with which its papers print their rates; and a step's time as the
sum of its parts, op by op (`stretto.cost.efficiency`), collective by collective
(`stretto.cost.collectives`), through a 1F1B pipeline.

    1. A layer's forward and backward as ops with their shapes on one rank (Megatron-LM's layer: attention
       with stored scores, fused softmax, bias+GELU and bias+dropout+add; tensor parallelism without
       sequence parallelism: two all-reduces forward and two backward).
    2. A stage's F and B for one microbatch: its layers, the embedding in the first stage, logits and loss in
       the last; B repeats F first where activations are recomputed.
    3. 1F1B: the slowest stage works on every microbatch, the others add theirs once (Narayanan et al. 2021);
       each hop adds its message.
    4. Once a step: gradients are summed over dp, tied embeddings over first and last stage, the optimizer
       walks its state, and the step has a fixed cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stretto.cost.collectives import Collective, CollectiveModel
from stretto.cost.efficiency import Matmul, Roof, op_us
from stretto.cost.fabric import axis_group
from stretto.errors import UsageError

HALF = 2
"""Bytes of an activation, a parameter and a gradient in fp16 or bf16."""

ADAM_BYTES = 28
"""Bytes that Adam moves for a parameter: reads a half-precision gradient, the master and two moments in fp32,
writes these three and the half-precision parameter."""

LOSS_BYTES = 28
"""Bytes moved for each logit by softmax and loss in fp32 from half precision: cast (2 + 4), maximum and
subtraction (4 + 8), exponential and sum (8), gradient (scaled in place and cast). Counted from Megatron-LM's
vocab-parallel cross entropy."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A GPT: `layers` of `hidden` with `heads`, sequences of `seq` tokens, `vocab` words."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a step is laid out; `recompute`: activations of every layer are computed again in the backward."""

    tp: int
    pp: int
    dp: int
    micro_batch: int
    global_batch: int
    recompute: bool

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches of a pipeline. Raises UsageError when they do not come out even."""
        count, rest = divmod(self.global_batch, self.micro_batch * self.dp)
        if rest or not count:
            raise UsageError(
                f"a global batch of {self.global_batch} is no multiple of {self.dp} pipelines times "
                f"microbatches of {self.micro_batch}"
            )
        return count


def megatron_flops(model: Transformer, batch: int, *, recompute: bool = True) -> float:
    """Arithmetic of a step over `batch` sequences as Megatron counts it.

    96 B s l h^2 (1 + s/6h + V/16lh), with the forward counted twice where activations are recomputed, which
    is how the paper prints its rates (Narayanan et al. 2021, SC21, section 5.1); 72 without.
    """
    s, l, h, v = model.seq, model.layers, model.hidden, model.vocab
    if recompute:
        return 96.0 * batch * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    return 72.0 * batch * s * l * h * h * (1 + s / (6 * h) + v / (12 * l * h))


@dataclass(frozen=True, slots=True)
class Work:
    """An op on one rank: bytes moved, and the shape if it is a matmul."""

    nbytes: float
    dims: Matmul | None = None


def layer_forward(model: Transformer, tp: int, micro_batch: int) -> list[Work]:
    """Step 1: the ops of a layer's forward on one of `tp` ranks."""
    t, h = micro_batch * model.seq, model.hidden
    head = h // model.heads
    heads = micro_batch * max(1, model.heads // tp)
    stream, scores = t * h, heads * model.seq**2
    return [
        Work(2 * HALF * stream),  # norm
        _matmul(t, 3 * h // tp, h),
        Work(2 * HALF * 3 * stream / tp),  # heads apart
        _matmul(model.seq, model.seq, head, heads),
        Work(2 * HALF * scores),  # scale and mask
        Work(2 * HALF * scores),  # softmax
        Work((2 * HALF + 1) * scores),  # dropout and its mask
        _matmul(model.seq, head, model.seq, heads),
        Work(2 * HALF * stream / tp),  # heads together
        _matmul(t, h, h // tp),
        Work((3 * HALF + 1) * stream),  # bias, dropout, add
        Work(2 * HALF * stream),  # norm
        _matmul(t, 4 * h // tp, h),
        Work(2 * HALF * 4 * stream / tp),  # bias, GELU
        _matmul(t, h, 4 * h // tp),
        Work((3 * HALF + 1) * stream),
    ]


def backward_of(forward: list[Work]) -> list[Work]:
    """The ops of the backward: two matmuls for each, and gradients as well as values for the others."""
    found: list[Work] = []
    for work in reversed(forward):
        if work.dims is None:
            found.append(Work(1.5 * work.nbytes))
        else:
            d = work.dims
            found.append(Work(work.nbytes, Matmul(d.m, d.k, d.n, d.batch)))  # input gradient
            found.append(Work(work.nbytes, Matmul(d.k, d.n, d.m, d.batch)))  # weight gradient
    return found


def _matmul(m: int, n: int, k: int, batch: int = 1) -> Work:
    return Work(HALF * batch * (m * k + k * n + m * n), Matmul(m, n, k, batch))


def padded_vocab(vocab: int, tp: int) -> int:
    """Words on each of `tp` ranks: as they are on one, else made even in multiples of 128 (Megatron-LM)."""
    return vocab if tp == 1 else -(-vocab // (128 * tp)) * 128


@dataclass(frozen=True, slots=True)
class Step:
    """Costs of a step that its shapes do not tell.

    forward_launches, backward_launches: ops that the host launches for a layer; collective_launches: ops
    beside each tensor-parallel all-reduce; step_us: once a step; grad_bytes: bytes of a gradient when it is
    summed; message_us: what a hop of the pipeline costs beside its message.
    """

    forward_launches: float = 30.0
    backward_launches: float = 45.0
    collective_launches: float = 2.0
    step_us: float = 5000.0
    grad_bytes: float = 2.0
    message_us: float = 50.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time and its parts, microseconds."""

    total_us: float
    pipeline_us: float
    bubble_us: float
    tp_us: float
    dp_us: float
    optimizer_us: float


def step_time(
    model: Transformer, layout: Layout, roof: Roof, links: CollectiveModel, costs: Step
) -> StepTime:
    """Predict a training step. Ranks fill nodes with tp innermost, then dp, then pp (Megatron's order).

    Raises UsageError when layers or microbatches do not come out even.
    """
    tp, pp, mb = layout.tp, layout.pp, layout.micro_batch
    if model.layers % pp:
        raise UsageError(f"{model.layers} layers do not come out even on {pp} stages")
    mesh: Mapping[str, int] = {"pp": pp, "dp": layout.dp, "tp": tp}
    where = {axis: axis_group(mesh, axis, links.fabric.node_devices) for axis in mesh}
    t, h = mb * model.seq, model.hidden
    layers = model.layers // pp
    forward = layer_forward(model, tp, mb)
    reduce_us = links.us(Collective.ALL_REDUCE, HALF * t * h, where["tp"])
    launch = roof.efficiency.launch_us

    def device(ops: list[Work]) -> float:
        return sum(op_us(0.0, work.nbytes, work.dims, roof) for work in ops)

    def phase(ops: list[Work], launches: float) -> float:
        host = launches + (2 * costs.collective_launches if tp > 1 else 0.0)
        return layers * max(device(ops) + 2 * reduce_us, host * launch)

    f = phase(forward, costs.forward_launches)
    b = phase(backward_of(forward), costs.backward_launches)
    if layout.recompute:
        b += f
    vocab = padded_vocab(model.vocab, tp)
    head = [_matmul(t, vocab, h), Work(LOSS_BYTES * t * vocab)]
    stages = [[f, b] for _ in range(pp)]
    stages[0][0] += device([Work(3 * HALF * t * h)])
    stages[0][1] += device([Work(3 * HALF * t * h)])
    stages[-1][0] += device(head)
    stages[-1][1] += device(backward_of(head)[1:])
    m = layout.microbatches
    slowest = max(sum(stage) for stage in stages)
    hop = 0.0
    if pp > 1:
        hop = links.us(Collective.P2P, HALF * t * h, where["pp"]) + costs.message_us
    pipeline = (m - 1) * (slowest + (2 * hop if pp > 1 else 0.0)) + sum(map(sum, stages)) + 2 * (pp - 1) * hop
    busy = m * slowest
    parameters = layers * (12 * h * h / tp + 9 * h) + vocab * h + (model.seq * h)
    dp_us = links.us(Collective.ALL_REDUCE, costs.grad_bytes * parameters, where["dp"])
    tied = links.us(Collective.ALL_REDUCE, costs.grad_bytes * vocab * h, where["pp"]) if pp > 1 else 0.0
    adam = ADAM_BYTES * parameters / (roof.memory_bytes_per_us * roof.efficiency.memory)
    total = pipeline + dp_us + tied + adam + costs.step_us
    return StepTime(total, pipeline, pipeline - busy, 6 * layers * m * reduce_us, dp_us + tied, adam)

"""A training step of a transformer by formula: from sizes and a layout to microseconds, with no model.

Two things: Megatron's count of arithmetic, with which its papers print their rates; and a step's time as the
sum of its parts, op by op (`stretto.price.efficiency`), collective by collective
(`stretto.price.collectives`), through a 1F1B pipeline.

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

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from stretto.errors import UsageError
from stretto.ir.collectives import ALL_REDUCE, SEND
from stretto.price.collectives import Fabric, Group, axis_group, collective_curve
from stretto.price.efficiency import Matmul, Roof, op_us

HALF = 2
"""Bytes of an activation, a parameter and a gradient in fp16 or bf16."""

ADAM_BYTES = 28
"""Bytes that Adam moves for a parameter: reads a half-precision gradient, the master and two moments in fp32,
writes these three and the half-precision parameter."""

LAYER_VECTORS = 13
"""Biases and norms of a layer, in multiples of hidden: 3 + 1 + 4 + 1 biases, two norms of two."""

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
class TrainLayout:
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
    is how the paper prints its rates (Narayanan et al. 2021, SC21, section 5.1); else 72 and V/12lh.
    """
    s, h, v = model.seq, model.hidden, model.vocab
    passes = 4 if recompute else 3  # a backward is two forwards; the logits are not computed again
    attention, logits = 1 + s / (6 * h), v / (4 * passes * model.layers * h)
    return 24.0 * passes * batch * s * model.layers * h * h * (attention + logits)


@dataclass(frozen=True, slots=True)
class OpBytes:
    """An op on one rank: bytes moved, and the shape if it is a matmul."""

    nbytes: float
    dims: Matmul | None = None


def layer_forward(model: Transformer, tp: int, micro_batch: int) -> list[OpBytes]:
    """Step 1: the ops of a layer's forward on one of `tp` ranks."""
    t, h = micro_batch * model.seq, model.hidden
    head = h // model.heads
    heads = micro_batch * max(1, model.heads // tp)
    stream, scores = t * h, heads * model.seq**2
    return [
        OpBytes(2 * HALF * stream),  # norm
        _matmul(t, 3 * h // tp, h),
        OpBytes(2 * HALF * 3 * stream / tp),  # heads apart
        _matmul(model.seq, model.seq, head, heads),
        OpBytes(2 * HALF * scores),  # scale and mask
        OpBytes(2 * HALF * scores),  # softmax
        OpBytes((2 * HALF + 1) * scores),  # dropout and its mask
        _matmul(model.seq, head, model.seq, heads),
        OpBytes(2 * HALF * stream / tp),  # heads together
        _matmul(t, h, h // tp),
        OpBytes((3 * HALF + 1) * stream),  # bias, dropout, add
        OpBytes(2 * HALF * stream),  # norm
        _matmul(t, 4 * h // tp, h),
        OpBytes(2 * HALF * 4 * stream / tp),  # bias, GELU
        _matmul(t, h, 4 * h // tp),
        OpBytes((3 * HALF + 1) * stream),
    ]


def backward_of(forward: list[OpBytes]) -> list[OpBytes]:
    """The ops of the backward: two matmuls for each, and gradients as well as values for the others."""
    result: list[OpBytes] = []
    for work in reversed(forward):
        if work.dims is None:
            result.append(OpBytes(1.5 * work.nbytes))
        else:
            d = work.dims
            result.append(OpBytes(work.nbytes, Matmul(d.m, d.k, d.n, d.batch)))  # input gradient
            result.append(OpBytes(work.nbytes, Matmul(d.k, d.n, d.m, d.batch)))  # weight gradient
    return result


def _matmul(m: int, n: int, k: int, batch: int = 1) -> OpBytes:
    return OpBytes(HALF * batch * (m * k + k * n + m * n), Matmul(m, n, k, batch))


def padded_vocab(vocab: int, tp: int) -> int:
    """Words on each of `tp` ranks: as they are on one, else made even in multiples of 128 (Megatron-LM)."""
    return vocab if tp == 1 else -(-vocab // (128 * tp)) * 128


@dataclass(frozen=True, slots=True)
class Software:
    """What the framework that trains adds to the shapes' own time.

    forward_launches, backward_launches: ops that the host launches for a layer; collective_launches: ops
    beside each tensor-parallel all-reduce; message_us: what a hop of the pipeline costs beside its message;
    step_us: what a step costs once; gradient_bytes: of a gradient while it is summed over dp.
    """

    forward_launches: float
    backward_launches: float
    collective_launches: float
    message_us: float
    step_us: float
    gradient_bytes: float = 2.0


MEGATRON_DEEPSPEED = Software(30.0, 98.6, 3.2, 366.0, 3400.0)
"""Fitted together with `launch_us`, `kernel_us` and `unaligned` of the A100 on every second of the 693 steps
of vTrain's ground_truth_single; 30 launches forward and half-precision gradients are assumed."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time and its parts, microseconds. bubble_us: of the pipeline's time, what its slowest stage
    does not work; tp_us: all-reduces within layers, a part of the pipeline's time."""

    total_us: float
    pipeline_us: float
    bubble_us: float
    tp_us: float
    dp_us: float
    optimizer_us: float


def run_us(device_us: Iterable[float], launches: float, roof: Roof) -> float:
    """Microseconds of ops one after the other: the device's sum, or the host's launches if that is longer."""
    return max(sum(device_us), launches * roof.efficiency.launch_us)


def step_time(
    model: Transformer,
    layout: TrainLayout,
    roof: Roof,
    links: Fabric,
    software: Software = MEGATRON_DEEPSPEED,
) -> StepTime:
    """Predict a training step. Ranks fill nodes with tp innermost, then dp, then pp (Megatron's order).

    Raises UsageError when layers or microbatches do not come out even.
    """
    tp, pp = layout.tp, layout.pp
    if model.layers % pp:
        raise UsageError(f"{model.layers} layers do not come out even on {pp} stages")
    mesh = {"pp": pp, "dp": layout.dp, "tp": tp}
    where = {axis: axis_group(mesh, axis, links.node_devices) for axis in mesh}
    layers, microbatches = model.layers // pp, layout.microbatches
    stream_bytes = HALF * layout.micro_batch * model.seq * model.hidden
    words = padded_vocab(model.vocab, tp)

    # Step 2: stages[k] = F + B of one microbatch.
    shape = replace(model, layers=1)
    layer_f, layer_b = _layer_us(shape, tp, layout.micro_batch, roof)
    embed_us, head_us = _ends_us(shape, words, layout.micro_batch, roof)
    reduce_us = 2 * collective_curve(ALL_REDUCE.name, where["tp"], links).us(stream_bytes)
    around = 2 * software.collective_launches if tp > 1 else 0.0
    f = run_us((layer_f, reduce_us), software.forward_launches + around, roof)
    b = run_us((layer_b, reduce_us), software.backward_launches + around, roof)
    passes = 2 if layout.recompute else 1
    stages = [layers * (passes * f + b)] * pp
    stages[0] += embed_us
    stages[-1] += head_us

    # Step 3.
    hop = 0.0
    if pp > 1:
        hop = collective_curve(SEND.name, where["pp"], links).us(stream_bytes) + software.message_us
    pipeline = (microbatches - 1) * (max(stages) + 2 * hop) + sum(stages) + 2 * (pp - 1) * hop

    # Step 4.
    h = model.hidden
    parameters = layers * (12 * h * h / tp + LAYER_VECTORS * h) + (words + model.seq) * h
    dp_us = collective_curve(ALL_REDUCE.name, where["dp"], links).us(software.gradient_bytes * parameters)
    if pp > 1:
        ends = Group(2, 1) if where["pp"].nodes == 1 else Group(1, 2)
        dp_us += collective_curve(ALL_REDUCE.name, ends, links).us(software.gradient_bytes * words * h)
    adam = ADAM_BYTES * parameters / (roof.memory_bytes_per_us * roof.efficiency.memory)
    return StepTime(
        total_us=pipeline + dp_us + adam + software.step_us,
        pipeline_us=pipeline,
        bubble_us=pipeline - microbatches * max(stages),
        tp_us=(passes + 1) * layers * microbatches * reduce_us,
        dp_us=dp_us,
        optimizer_us=adam,
    )


@lru_cache(maxsize=1024)
def _layer_us(model: Transformer, tp: int, micro_batch: int, roof: Roof) -> tuple[float, float]:
    """A layer's forward and backward on the device alone."""
    forward = layer_forward(model, tp, micro_batch)
    return _sum_us(forward, roof), _sum_us(backward_of(forward), roof)


@lru_cache(maxsize=1024)
def _ends_us(model: Transformer, words: int, micro_batch: int, roof: Roof) -> tuple[float, float]:
    """F + B of the embedding, and of the logits with their loss; `words` are those of one rank."""
    t, h = micro_batch * model.seq, model.hidden
    logits = [_matmul(t, words, h)]
    head = [*logits, *backward_of(logits), OpBytes(LOSS_BYTES * t * words)]
    return _sum_us([OpBytes(3 * HALF * t * h)] * 2, roof), _sum_us(head, roof)


def _sum_us(ops: list[OpBytes], roof: Roof) -> float:
    return sum(op_us(0.0, work.nbytes, work.dims, roof) for work in ops)

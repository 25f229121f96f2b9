"""One rank's walk through its instructions: the values it has, the buffers it lends, the grads it adds up.

Generated windows call a `RankState` as `hooks`. Knows no optimizers; `stretto.runtime.runner` is the face.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from stretto.backend.dispatch_adapter import add_product, product
from stretto.backend.specs import constants_of
from stretto.ir.action import ONCE
from stretto.ir.axes import PIPELINE, WITHIN
from stretto.ir.collectives import KINDS
from stretto.ir.kept import added_spec
from stretto.ir.placed_programs import differing_in
from stretto.ir.plan import Instruction, InstructionKind, Plan
from stretto.ir.program import GRAD, PARAM, SHARD, STEP_LOSS, STEP_NORM
from stretto.ir.updates import norm_spec
from stretto.runtime.compile import CompiledWriter, Compiler
from stretto.runtime.counting import Divisor
from stretto.runtime.generate import Externals, Generated, Started, Store, generate
from stretto.runtime.observed import ObservedWatch
from stretto.runtime.record import Marks, clock_of
from stretto.runtime.transport import Handle, Transport

_DRAWING = threading.Lock()
"""Ranks that are threads share the process's generator: a draw and its seed belong together, and the
generator is given back as it was before another rank, or the user, sees it."""

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A well-mixed 63-bit number of several (SplitMix64's finaliser, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RankState:
    """What one rank needs to walk its instructions. Reused for every step."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        device: torch.device,
        parameters: Mapping[int, torch.Tensor],
        buffers: Mapping[int, torch.Tensor],
        seed: int,
        compiler: Compiler | None = None,
    ) -> None:
        """parameters, buffers: index in the job -> the tensor that ops read, or of a parameter of which a
        program makes what they read, what it is made of. compiler: compiles stretches of compute; without it
        every op is a call."""
        self.plan = plan
        self.transport = transport
        self.device = device
        self.seed = seed
        self.steps = 0
        self.optimize: Callable[[dict[int, torch.Tensor], torch.Tensor | None, float], None] | None = None
        """Where updates are ops: changes parameters by gradients (index in the job -> the gradient), which it
        may keep. Where there is a norm, it scales them, so that the norm becomes the last argument at
        most."""
        self.trained: Callable[[int, torch.Tensor], Sequence[torch.Tensor]] = lambda _, grad: (grad,)
        """What of a gradient (by its index in the job) is of what is still trained, and so of the norm."""
        self.norm: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None
        self.clock = clock_of(device)
        self.marks = Marks()
        self.grads: dict[int, torch.Tensor] = {}
        self._buffers = buffers
        job = plan.job
        self._made: dict[str, torch.Tensor] = {}
        of = {k: job.parameters[k] for k in parameters}
        fixed = {
            SHARD + known.kept_as if known.is_made else PARAM + known.name: parameters[k]
            for k, known in of.items()
        }
        fixed |= {f"buffer/{job.buffers[k].name}": t for k, t in buffers.items()}
        fixed |= constants_of(job, device)
        self._loss_dtype: torch.dtype = getattr(torch, job.loss_spec.dtype)
        fixed["tangent"] = torch.tensor(job.tangent, dtype=self._loss_dtype, device=device)
        self.divisor = Divisor(job, device, fixed["tangent"])
        self.coordinates = plan.mesh.coordinates(transport.rank)
        self.pp_rank = self.coordinates[PIPELINE]
        self.watch = ObservedWatch(plan, self.pp_rank, device)
        externals = Externals(
            fixed,
            device,
            frozenset(f"buffer/{b.name}" for b in job.buffers if b.updates),
            self.coordinates,
            {axis: frozenset(differing_in(job, axis)) for axis in WITHIN if job.size(axis) > 1},
        )
        order = plan.orders[self.pp_rank]
        used = {str(i.ref) for i in order if i.kind is InstructionKind.RUN}
        self.windows: dict[str, Generated] = {
            name: generate(job, plan.windows[name], externals)
            if compiler is None
            else CompiledWriter(job, plan.windows[name], externals, compiler).write()
            for name in sorted(used)
        }
        self._grad_dtype = {k: tensor.dtype for k, tensor in parameters.items()}
        self._numbers = {GRAD + job.parameters[k].name: k for k in parameters}
        # Draws of data-parallel copies differ as those of microbatches do.
        self._first_microbatch = job.copy_of(self.coordinates) * job.microbatches
        self._actions: dict[InstructionKind, Callable[[Instruction], None]] = {
            InstructionKind.RECV: self._recv,
            InstructionKind.RUN: self._run,
            InstructionKind.SENT: self._sent,
        }
        self._clear()

    def _peer(self, stage: int) -> int:
        return self.plan.mesh.rank({**self.coordinates, PIPELINE: self.plan.rank_of(stage)})

    def _clear(self) -> None:
        self.grads = {}
        self._made = {}
        self._batch: list[dict[str, torch.Tensor]] = []
        self._stores: dict[tuple[int, int], Store] = {}
        self._received: dict[tuple[int, int], tuple[Handle, torch.Tensor]] = {}
        self._local: dict[tuple[int, int], torch.Tensor] = {}
        self._leaving: dict[tuple[int, int], tuple[Handle, torch.Tensor]] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._loss: torch.Tensor | None = None

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Walk all instructions once. batch: leaves of the full batch. Returns the step's loss.

        Afterwards `grads[index]` has this step's gradient of each parameter that has one, and `watch` what
        the model lets see.
        """
        self._clear()
        self.watch.begin()
        count, first = self.plan.job.microbatches, self._first_microbatch
        pieces = self.plan.job.pieces
        parts = {
            name: (leaf,) * count
            if name in self.plan.job.replicated
            else leaf.chunk(pieces)[first : first + count]
            for name, leaf in batch.items()
        }
        self._batch = [{name: chunks[m] for name, chunks in parts.items()} for m in range(count)]
        self.divisor.begin(batch)
        self.marks = Marks()
        try:
            with torch.no_grad():
                self.marks.start = self.clock.now()
                for instruction in self.plan.orders[self.pp_rank]:
                    self._actions[instruction.kind](instruction)
                self.marks.end = self.clock.now()
        finally:
            if self._kept is not None:
                self.drawn()  # an op failed between its seed and its end
        self.steps += 1
        loss, grads = self.share_of_loss() if self._loss is None else self._loss, self.grads
        leftover = [key for key, store in self._stores.items() if store]
        assert not leftover, f"values left after the step in {leftover}"
        self._clear()
        self.grads = grads
        return loss

    # Instructions.

    def _recv(self, instruction: Instruction) -> None:
        edge = self.plan.job.edges[int(instruction.ref)]
        buffer = torch.empty(edge.spec.shape, dtype=getattr(torch, edge.spec.dtype), device=self.device)
        handle = self.transport.recv(self.plan.lane_of(edge.index), buffer, self._peer(edge.source))
        self._received[edge.index, instruction.microbatches[0]] = handle, buffer

    def _run(self, instruction: Instruction) -> None:
        name = str(instruction.ref)
        window = self.windows[name]
        arguments: list[object] = []
        for stage, microbatch in zip(window.stages, instruction.microbatches, strict=True):
            store = self._stores.setdefault((stage, microbatch), {})
            arguments += [self._batch[microbatch] if microbatch != ONCE else {}, store, microbatch]
        start = self.clock.now()
        window.run(self, *arguments)
        self.marks.runs.append((name, instruction.microbatches, start, self.clock.now()))

    def _sent(self, instruction: Instruction) -> None:
        key = (int(instruction.ref), instruction.microbatches[0])
        handle, _ = self._leaving.pop(key)
        start = self.clock.now()
        handle.wait()
        name = f"{self.plan.lane_of(key[0])} sent e{key[0]}:{key[1]}"
        self.marks.others.append((name, start, self.clock.now()))

    # The `hooks` of a window's generated function (`stretto.runtime.generate`): what it calls besides ops.
    # Edges and parameters are indices in the job's lists.

    def wait(self, edge: int, microbatch: int) -> torch.Tensor:
        key = (edge, microbatch)
        if key in self._local:
            return self._local.pop(key)
        handle, buffer = self._received.pop(key)
        start = self.clock.now()
        handle.wait()
        self.marks.waits.append((edge, microbatch, start, self.clock.now()))
        stride = self.plan.job.edges[edge].spec.stride
        return buffer if stride is None else _with_stride(buffer, stride)

    def send(self, edge: int, microbatch: int, value: torch.Tensor) -> None:
        to = self._peer(self.plan.job.edges[edge].target)
        if to == self.transport.rank:
            self._local[edge, microbatch] = value
            return
        value = value.contiguous()
        self.marks.sends.append((edge, microbatch, self.clock.now()))
        self._leaving[edge, microbatch] = (self.transport.send(self.plan.lane_of(edge), value, to), value)

    def over_step(self, name: str) -> torch.Tensor:
        """What lives over the step, as it is now, in one piece. A gradient to which this rank adds nothing is
        zero."""
        if name == STEP_LOSS:
            return self.share_of_loss()
        if name in self._made:
            return self._made[name]
        k = self._numbers[name]
        kept = self.grads.get(k)
        if kept is None:
            shape = added_spec(self.plan.job, self.plan.job.parameters[k]).shape
            kept = torch.zeros(shape, dtype=self._grad_dtype[k], device=self.device)
        self.grads[k] = kept = kept.contiguous()
        return kept

    def write(self, name: str, value: torch.Tensor) -> None:
        """It is this from now on."""
        if name == STEP_LOSS:
            self._loss = value
        elif name == STEP_NORM:
            self.norm = value
        elif name.startswith(PARAM):
            self._made[name] = value
        else:
            self.grads[self._numbers[name]] = value

    def free(self, names: Sequence[str]) -> None:
        """They are there no longer."""
        for name in names:
            self._made.pop(name, None)
            self.grads.pop(self._numbers.get(name, -1), None)

    def squares(self, gradients: Sequence[str], copies: int) -> torch.Tensor:
        """The sum of squares of their elements, over `copies`; of those that are still trained."""
        dtype = getattr(torch, norm_spec(self.plan.job).dtype)
        given = ((self._numbers[name], self.over_step(name)) for name in gradients)
        counted = [one for k, grad in given for one in self.trained(k, grad)]
        if not counted:
            return torch.zeros((), dtype=dtype, device=self.device)
        return torch.nn.utils.get_total_norm([one.to(dtype) for one in counted]).square() / copies

    def update(self, gradients: Sequence[str], norm: torch.Tensor | None = None, most: float = 0.0) -> None:
        """What the optimizer does with these, which are scaled where the norm of all is above `most`; they
        go."""
        assert self.optimize is not None, "the face has given it"
        given = {self._numbers[name]: self.over_step(name) for name in gradients}
        self.free(gradients)
        self.optimize(given, norm if most else None, most)

    def share_of_loss(self) -> torch.Tensor:
        """One of each copy's ranks adds its share, the others nothing."""
        if not self._losses:
            return torch.zeros((), dtype=self._loss_dtype, device=self.device)
        return self.divisor.share([self._losses[m] for m in sorted(self._losses)])

    def start(
        self,
        name: str,
        kind: str,
        how: str,
        lane: str,
        value: torch.Tensor,
        size: int,
        *,
        in_place: bool = False,
    ) -> Started:
        """in_place: whether the result takes the place of the value."""
        began = self.clock.now()
        row = KINDS[kind]
        if row.in_place:
            result = source = value if in_place else value.clone(memory_format=torch.contiguous_format)
        else:
            source = value.contiguous()
            shape = row.shape(source.shape, size, how)
            assert shape is not None, "the plan is proved"
            result = source.new_empty(shape)
        handle = self.transport.collective(lane, kind, result, source, how)
        full = max(result.nbytes, source.nbytes)
        self.marks.starts.append((name, full, began))
        return Started(name, lane, handle, result, source)

    def finish(self, started: Started) -> torch.Tensor:
        start = self.clock.now()
        started.handle.wait()
        self.marks.finishes.append((started.name, started.lane, start, self.clock.now()))
        return started.result

    def add_grad(self, parameter: int, value: torch.Tensor, owned: bool) -> None:
        kept = self.grads.get(parameter)
        if kept is not None:
            kept.add_(value)
            return
        dtype = self._grad_dtype[parameter]
        if value.dtype is not dtype:
            value = value.to(dtype)
        elif not owned:
            value = value.clone()
        self.grads[parameter] = value

    def add_product(self, parameter: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a matrix product to a gradient. BLAS adds while it multiplies, which saves writing and reading
        a tensor of the parameter's size for every microbatch; it rounds otherwise than product, then sum."""
        kept = self.grads.get(parameter)
        if kept is None or kept.dtype is not left.dtype:
            self.add_grad(parameter, product(left, right), True)
        else:
            add_product(kept, left, right)

    def add_loss(self, microbatch: int, value: torch.Tensor) -> None:
        self._losses[microbatch] = value

    def add_metric(self, metric: int, value: torch.Tensor) -> None:
        self.watch.add(metric, value)

    def update_buffer(self, buffer: int, value: torch.Tensor) -> None:
        self._buffers[buffer].copy_(value)

    def enter(self, part: int) -> None:
        self.marks.parts.append((self.clock.now(), part))

    def draw(self, microbatch: int, op: int) -> None:
        _DRAWING.acquire()
        generator = self._generator()
        self._kept = generator.get_state()
        generator.manual_seed(mix(self.seed, self.steps, microbatch + self._first_microbatch, op))

    def drawn(self) -> None:
        assert self._kept is not None
        self._generator().set_state(self._kept)
        self._kept = None
        _DRAWING.release()

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator


def _with_stride(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same elements in the layout that the captured ops expect (views depend on it)."""
    if any(s == 0 and n > 1 for s, n in zip(stride, value.shape, strict=True)):
        return value  # an expanded tensor: its elements do not all have a place of their own
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)

"""A window becomes one Python function: the plan's ops in order, with waits and sends in their places.

The function's text is what it does, op by op; nothing is looked up while it runs. `Generated.source` has it.
`hooks` is the `RankState` of `runtime.rank`. Views are called as `reshape` (`dispatch_adapter.INSTEAD`).

    1. Values that other windows made are taken from the microbatch's store, for good when neither a later
       window nor another part of this one reads them there. Parameters, buffers and constants are bound once.
    2. Every op is one call. A value is deleted after its last use, as is each result of an op with several.
    3. `wait` returns a received tensor; `send` starts a message right after its op. A communication of the
       program is started and waited for where its ops are.
    4. Gradients, the loss, metrics and buffer updates go to the rank's state where they arise; buffers are
       updated last, so that every op of the window reads the microbatch's own version. A gradient that is a
       matrix product is given as its two factors: the product is added where the gradient is kept. Ops of
       programs that run once a step read there what lives over the step, and write it.
    5. Values that later windows read go into the store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from stretto.backend.dispatch_adapter import op_key, resolve
from stretto.ir.action import ONCE_PHASES, Phase
from stretto.ir.flow import OVER_STEP, PHASES, is_external, made_parameters, results_of
from stretto.ir.plan import ItemKind, Window
from stretto.ir.program import CHUNK, FREE, GETITEM, INDEX, STARTS, WAIT, Arg, Const, Job, Op, Ref
from stretto.ir.storage import partial_sums
from stretto.runtime.state_calls import state_call
from stretto.runtime.transport import Handle

Store = dict[str, Any]
"""Values of one (stage, microbatch) that live between windows: tensors, and communications under way."""


@dataclass(slots=True)
class Started:
    """A communication under way. name, lane: for the record; result: complete once `handle` is done; source:
    kept alive until then."""

    name: str
    lane: str
    handle: Handle
    result: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True)
class Externals:
    """The tensors that ops read and do not make. Keys are names as in the program (`param/...`)."""

    fixed: Mapping[str, torch.Tensor]
    device: torch.device
    written: frozenset[str] = frozenset()
    """Names of buffers that the model writes: their value is kept for the microbatch's later windows."""
    coordinates: Mapping[str, int] = field(default_factory=dict)
    """Axis -> this rank's coordinate; 0 for axes that are not named."""
    differing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Axis -> names of values that differ along it: random ops on them draw for each of its ranks."""


@dataclass(frozen=True, slots=True)
class Generated:
    """`run(hooks, batch leaves of each part, store of each part, microbatch of each part)`. hooks: the
    rank's `stretto.runtime.rank.RankState`, whose methods a window calls besides ops."""

    run: Callable[..., None]
    source: str
    stages: tuple[int, ...]


def generate(job: Job, window: Window, externals: Externals) -> Generated:
    """Make the function of a window. externals: with all fixed tensors that the window's stages read."""
    return Writer(job, window, externals).write()


class Writer:
    """Writes a window's function, item by item (`compile.CompiledWriter` writes stretches of them)."""

    def __init__(self, job: Job, window: Window, externals: Externals) -> None:
        self.job = job
        self.window = window
        self.externals = externals
        self.lines: list[str] = []
        self.entered = -1
        self.bound: dict[str, Any] = {"DEVICE": externals.device, "INF": float("inf"), "NAN": float("nan")}
        self.names: dict[tuple[int, str], str] = {}
        self.numbers = count()  # a name that is gone leaves its number unused
        stages = {stage for stage, _ in window.parts}
        self.ops = {(s, op.name): op for s in stages for ops in job.stages[s].ops.values() for op in ops}
        self.reads = {
            (s, phase): {name for op in ops for name in op.uses}
            for s in stages
            for phase, ops in job.stages[s].ops.items()
        }
        self.here = {item.ref for item in window.items}
        self.last_readers = {
            (s, phase): {name: op.name for op in job.stages[s].ops.get(phase, ()) for name in op.uses}
            for s in stages
            for phase in ONCE_PHASES
        }
        self.takers: dict[tuple[int, str], list[tuple[Phase, Op]]] = defaultdict(list)
        for s in stages:
            for phase, ops in job.stages[s].ops.items():
                for op in ops:
                    if op.target == GETITEM:
                        self.takers[s, op.uses[0]].append((phase, op))
        self.partial_sums = {s: partial_sums(job, s) for s in stages}
        self.results = {(s, phase): results_of(job, s, phase) for s in stages for phase in PHASES}
        self.parameters = {p.name: k for k, p in enumerate(job.parameters)}
        self.buffers = {b.name: k for k, b in enumerate(job.buffers)}
        self.made_parameters = made_parameters(job)

    def write(self) -> Generated:
        parts = range(len(self.window.parts))
        arguments = ", ".join(f"batch{p}, store{p}, m{p}" for p in parts)
        last_item = self._last_uses()
        self.items(last_item)
        self._updates()
        body = "\n".join(f"    {line}" for line in self.lines) or "    pass"
        source = f"def run(hooks, {arguments}):\n{body}\n"
        scope: dict[str, Any] = dict(self.bound)
        exec(compile(source, f"<stretto window {self.window.name}>", "exec"), scope)
        return Generated(scope["run"], source, tuple(stage for stage, _ in self.window.parts))

    def items(self, last_item: Mapping[int, list[tuple[int, str]]]) -> None:
        """All items in order. last_item: item position -> values that are not used after it."""
        for at in range(len(self.window.items)):
            self.item(at)
            self.delete(last_item.get(at, ()))

    def item(self, at: int) -> None:
        """One item: its op, wait or send."""
        item = self.window.items[at]
        self.enter(item.part)
        stage, phase = self.window.parts[item.part]
        if item.kind is ItemKind.OP:
            op = self.ops[stage, str(item.ref)]
            if self.is_product(op, stage):
                self.product(item.part, op, stage)
            else:
                self.call(item.part, op)
                self.keep_results(item.part, op, stage, phase)
        elif item.kind is ItemKind.WAIT:
            edge = self.job.edges[int(item.ref)]
            self.line(f"{self.name(item.part, edge.value)} = hooks.wait({edge.index}, m{item.part})")
            if self.later(stage, phase, edge.value):
                self._keep(item.part, edge.value)
        else:
            edge = self.job.edges[int(item.ref)]
            value = self.name(item.part, edge.value)
            self.line(f"hooks.send({edge.index}, m{item.part}, {value})")

    def enter(self, part: int) -> None:
        """Where several actions share the window, it is marked whose ops run from here on."""
        if len(self.window.actions) > 1 and part in self.window.actions and part != self.entered:
            self.line(f"hooks.enter({part})")
            self.entered = part

    def delete(self, values: Iterable[tuple[int, str]]) -> None:
        """Values that are not used any more."""
        done = [self.names[key] for key in values if key in self.names]
        if done:
            self.line(f"del {', '.join(done)}")

    # What the window reads and when it reads it last.

    def _last_uses(self) -> dict[int, list[tuple[int, str]]]:
        """Item position -> values of the window that are not used after it (step 2)."""
        last: dict[tuple[int, str], int] = {}
        for at, item in enumerate(self.window.items):
            if item.kind is ItemKind.OP:
                op = self.ops[self.window.parts[item.part][0], str(item.ref)]
                for name in (*op.uses, op.name):
                    if not self._is_fixed(name) and op.target != FREE:
                        last[item.part, name] = at
            else:
                last[item.part, self.job.edges[int(item.ref)].value] = at
        for part in self.window.actions:
            stage, phase = self.window.parts[part]
            # Buffers are written when the window ends; what they become lives until then.
            for sub in phase.programs:
                for value, uses in self.results[stage, sub].items():
                    if any(use.startswith("update ") for use in uses):
                        last.pop((part, value), None)
        result: dict[int, list[tuple[int, str]]] = {}
        for key, at in last.items():
            result.setdefault(at, []).append(key)
        return result

    def _is_fixed(self, name: str) -> bool:
        """Bound once: parameters, constants, the tangent, and buffers that the model only reads."""
        if not is_external(name) or name.startswith("batch/"):
            return False
        return name not in self.externals.written and not self._lives_over_step(name)

    def _lives_over_step(self, name: str) -> bool:
        return name.startswith(OVER_STEP) or name in self.made_parameters

    def later(self, stage: int, phase: Phase, name: str) -> bool:
        """Whether a window after this one reads the value in this stage. Of a program that runs once a step,
        ops that read one value run in their order."""
        if phase in ONCE_PHASES:
            last = self.last_readers[stage, phase].get(name)
            return last is not None and last not in self.here
        after = PHASES[PHASES.index(phase.programs[-1]) + 1 :]
        return any(name in self.reads[stage, sub] for sub in after)

    # Lines.

    def line(self, text: str) -> None:
        self.lines.append(text)

    def name(self, part: int, value: str) -> str:
        return self.names.get(key := (part, value)) or self.names.setdefault(key, f"v{next(self.numbers)}")

    def _keep(self, part: int, value: str) -> None:
        self.line(f"store{part}[{value!r}] = {self.name(part, value)}")

    def bind(self, prefix: str, key: str, value: Any) -> str:
        name = f"{prefix}_{key}"
        # Only ASCII: Python reads "ﬁ" as "fi", and "x²" not at all.
        name = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
        while name in self.bound and self.bound[name] is not value:
            name += "_"
        self.bound[name] = value
        return name

    def read(self, part: int, name: str) -> str:
        """Step 1: an expression for a value, loading it on first use."""
        if self._is_fixed(name):
            return self.bind("x", name, self.externals.fixed[name])
        if (part, name) in self.names:
            return self.names[part, name]
        stage, phase = self.window.parts[part]
        variable = self.name(part, name)
        later = self.later(stage, phase, name)
        if self._lives_over_step(name):
            self.line(f"{variable} = hooks.over_step({name!r})")
        elif name.startswith("batch/"):
            self.line(f"{variable} = batch{part}[{name.removeprefix('batch/')!r}]")
        elif name in self.externals.written and not any(
            name in self.reads[stage, sub] for sub in PHASES[: PHASES.index(phase.programs[0])]
        ):
            buffer = self.bind("x", name, self.externals.fixed[name])
            self.line(f"{variable} = {buffer}.clone()" if later else f"{variable} = {buffer}")
            if later:
                self._keep(part, name)
        else:
            again = self._read_again(part, name)
            self.line(f"{variable} = store{part}" + (f"[{name!r}]" if again else f".pop({name!r})"))
        return variable

    def _read_again(self, part: int, name: str) -> bool:
        """Whether the store must keep a value when this part has read it. Parts of one microbatch may come in
        any order: W may read before I what F has left."""
        stage, phase = self.window.parts[part]
        if phase in ONCE_PHASES:
            return self.later(stage, phase, name)
        mates = {mate: self.window.parts[mate][1].programs for mate in self.window.mates(part)}
        here = {sub for subs in mates.values() for sub in subs}
        after = PHASES[PHASES.index(phase.programs[-1]) + 1 :]
        if any(name in self.reads[stage, sub] for sub in after if sub not in here):
            return True
        return any(
            name in self.reads[stage, sub] and (mate, name) not in self.names
            for mate, subs in mates.items()
            for sub in subs
        )

    def call(self, part: int, op: Op) -> None:
        if op.target == GETITEM:
            self.read(part, op.name)  # it was taken when the tuple was made
            return
        if of_state := state_call(op, partial(self.name, part), partial(self.read, part)):
            self.line(of_state)
            return
        for name in op.uses:
            self.read(part, name)
        if op.random:
            self.line(f"hooks.draw(m{part}, {self._key(op)})")
        taken = (self.window.parts[part][0], op.name) in self.takers
        result = "parts" if taken else self.name(part, op.name)
        if op.target in STARTS or op.target in (WAIT, INDEX, CHUNK):
            self.line(f"{result} = {self._communication(part, op)}")
            return
        function = self.bind("f", op.target, resolve(op.target))
        arguments = [self._text(part, a) for a in op.args]
        assert all(key.isidentifier() for key, _ in op.kwargs), "no other text may become source"
        arguments += [f"{key}={self._text(part, value)}" for key, value in op.kwargs]
        self.line(f"{result} = {function}({', '.join(arguments)})")
        if op.random:
            self.line("hooks.drawn()")
        if taken:
            self.take(part, op.name, [f"parts[{k}]" for k in range(len(op.outputs))], "parts")

    def take(self, part: int, built: str, parts: Sequence[str], full: str) -> None:
        """Step 2: parts of a tuple become values, or are kept for a later window; nothing else keeps them.

        built: the tuple; parts: an expression for each of its parts; full: the variables in these.
        """
        stage, phase = self.window.parts[part]
        for sub, op in self.takers[stage, built]:
            # What runs once a step may be in several windows.
            here = sub in phase.programs and (phase not in ONCE_PHASES or op.name in self.here)
            value = self.name(part, op.name) if here else f"store{part}[{op.name!r}]"
            self.line(f"{value} = {parts[op.args[1]]}")
        self.line(f"del {full}")

    def _key(self, op: Op) -> int:
        """What draws depend on besides step and microbatch: what is computed again draws the same."""
        drawn = op.repeats or op.name
        for axis, names in self.externals.differing.items():
            if op.name in names:
                drawn += f" {axis} {self.externals.coordinates.get(axis, 0)}"
        return op_key(drawn)

    def _communication(self, part: int, op: Op) -> str:
        at, size = self.externals.coordinates, int(op.args[-1]) if op.target != WAIT else 0
        if op.target == INDEX:
            number = torch.tensor(at.get(str(op.args[0]), 0), device=self.externals.device)
            return self.bind("index", str(op.args[0]), number)
        value = self.read(part, op.args[0].name)
        if op.target == WAIT:
            return f"hooks.finish({value})"
        if op.target == CHUNK:
            spec = op.outputs[0]
            assert spec is not None
            dim = int(op.args[1])
            length = spec.shape[dim]
            return f"{value}.narrow({dim}, {at.get(str(op.args[2]), 0) * length}, {length})"
        assert op.kind is not None
        asked = f"{op.label!r}, {op.kind.name!r}, {op.how!r}, {op.lane!r}"
        return f"hooks.start({asked}, {value}, {size}, in_place={op.alias is not None})"

    def _text(self, part: int, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return self.read(part, arg.name)
        if isinstance(arg, tuple):
            return "[" + ", ".join(self._text(part, item) for item in arg) + "]"
        if isinstance(arg, Const):
            if arg.kind == "device":
                return "DEVICE"
            return self.bind("c", arg.text, getattr(torch, arg.text))
        if isinstance(arg, float):
            if arg != arg:
                return "NAN"
            if arg in (float("inf"), float("-inf")):
                return "INF" if arg > 0 else "-INF"
        return repr(arg)

    def keep_results(self, part: int, op: Op, stage: int, phase: Phase, may_own: bool = True) -> None:
        """Steps 4 and 5 for one op. may_own: False where another value may be in the result's storage."""
        if (stage, op.name) in self.takers or not op.outputs:
            return  # a tuple is its parts
        value = self.name(part, op.name)
        uses = [use for sub in phase.programs for use in self.results.get((stage, sub), {}).get(op.name, ())]
        owned = may_own and not any(
            partial_sum.copied for partial_sum in self.partial_sums[stage].get(op.name, ())
        )
        for use in uses:
            kind, _, name = use.partition(" ")
            if kind == "grad":
                self.line(f"hooks.add_grad({self.parameters[name]}, {value}, {owned})")
            elif kind == "loss":
                self.line(f"hooks.add_loss(m{part}, {value})")
            elif kind == "metric":
                self.line(f"hooks.add_metric({name}, {value})")
        for name in op.writes:
            before = self.names.pop((part, name), "")  # what it was: gone now, though it is read again
            self.line((f"{before} = None; " if before else "") + f"hooks.write({name!r}, {value})")
        if self.later(stage, phase, op.name):
            self._keep(part, op.name)

    def is_product(self, op: Op, stage: int) -> bool:
        """Whether the op is a matrix product that is a parameter's gradient and nothing else."""
        return any(partial_sum.product for partial_sum in self.partial_sums[stage].get(op.name, ()))

    def product(self, part: int, op: Op, stage: int) -> None:
        """Step 4: added where the gradient is kept, with no tensor between."""
        [partial_sum] = self.partial_sums[stage][op.name]
        name = partial_sum.parameter
        left, right = (self._text(part, arg) for arg in op.args)
        self.line(f"hooks.add_product({self.parameters[name]}, {left}, {right})")

    def _updates(self) -> None:
        for part in self.window.actions:
            stage, phase = self.window.parts[part]
            for sub in phase.programs:
                for value, uses in self.results[stage, sub].items():
                    for use in uses:
                        kind, _, name = use.partition(" ")
                        if kind == "update":
                            self.line(f"hooks.update_buffer({self.buffers[name]}, {self.name(part, value)})")

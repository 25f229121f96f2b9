"""Stretches of compute go through Inductor: ops between communications become one compiled function.

    1. Cut the window's items into stretches: ops that follow each other with no communication, message or
       random op between. Between two of these, ops of each part of the window are together. A stretch also
       ends where another block of the model begins, so that equal blocks give equal stretches, and what a
       block has read is freed before the next.
    2. A weight gradient that is a matrix product stays outside: it is added where the gradient is kept. So
       do views that are read outside; they are made again from what they are views of.
    3. What is left becomes a graph whose outputs are the values that are read outside of it.
    4. Graphs that are equal but for names are compiled once. A stretch with too little to fuse is not
       compiled: its ops are called one by one.
    5. The window's function (`stretto.runtime.generate`) calls what was compiled. The order of
       communications, messages, draws and gradients is that of the plan.

What a stretch reads lives until it ends, so the peak of memory is not that of the plan to the byte.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stretto.backend.dispatch_adapter import resolve
from stretto.backend.specs import decoded, empty_of, spec_of
from stretto.errors import UsageError
from stretto.ir.action import ONCE_PHASES
from stretto.ir.plan import ItemKind, Window
from stretto.ir.prices import specs_of
from stretto.ir.program import CHUNK, GETITEM, INDEX, STARTS, WAIT, Arg, Job, Op, TensorSpec
from stretto.passes.recompute import numbered
from stretto.runtime.generate import Externals, Writer
from stretto.runtime.memory_adapter import MemoryMeter

Key = tuple[int, str]
"""A value of a window: (part, name)."""

LEAST_FUSED = 2
"""Ops that Inductor could fuse, below which a stretch is not compiled. One op alone is what PyTorch's own
kernel does; a call of a compiled function costs its guards, 25 to 50 us (measured, 2 to 30 inputs)."""

_KERNELS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "embedding_dense_backward")
"""Ops that stay calls of PyTorch's kernels under Inductor, without overloads."""

_CALLING = threading.Lock()
"""Ranks that are threads compile, and call what was compiled, one after the other."""


def _fuses(op: Op) -> bool:
    name = op.target.split(".")[1] if "." in op.target else op.target
    kernel = name in _KERNELS or name.startswith("_scaled_dot_product")
    return op.alias is None and op.target != GETITEM and not kernel


def block_of(module: str) -> str:
    """The block that a module is in, `blocks.3` of `blocks.3.mlp.up`; "-" for a module that is in none, and
    "" for no module."""
    return next(iter(numbered(module)), module and "-")


def cut(window: Window, ops: Mapping[tuple[int, str], Op]) -> list[tuple[int, ...]]:
    """Step 1: positions of the window's items, in the order in which they are to run; each item alone or in a
    stretch. ops: (stage, name) -> op."""
    result: list[tuple[int, ...]] = []
    between: dict[int, list[tuple[int, Op]]] = {}

    def close() -> None:
        for part in between.values():
            result.extend(_by_block(part))
        between.clear()

    for at, item in enumerate(window.items):
        op = ops[window.parts[item.part][0], str(item.ref)] if item.kind is ItemKind.OP else None
        once = window.parts[item.part][1] in ONCE_PHASES
        if op is None or once or op.random or op.target in (*STARTS, WAIT, INDEX, CHUNK):
            close()
            result.append((at,))
        else:
            if any(mate in between for mate in window.mates(item.part)):
                close()  # what the other part has made may be read
            between.setdefault(item.part, []).append((at, op))
    close()
    return result


def _by_block(ops: Sequence[tuple[int, Op]]) -> Iterator[tuple[int, ...]]:
    stretch: list[int] = []
    block = ""
    for at, op in ops:
        here = block_of(op.module)  # what no module made belongs to what is before it
        if here and block and here != block:
            yield tuple(stretch)
            stretch = []
        block = here or block
        stretch.append(at)
    yield tuple(stretch)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps 2 and 3 of one stretch.

    before: parts of tuples that are made earlier, taken before the call. inputs: what the graph reads.
    graph: its ops. outputs: what it makes that is read outside. tuples: values of several outputs that are
    read outside as one value; their parts are outputs, named (part, "<name>#<index>"). after: products and
    views, to be called afterwards.
    """

    before: tuple[tuple[int, Op], ...]
    inputs: tuple[Key, ...]
    graph: tuple[tuple[int, Op], ...]
    outputs: tuple[Key, ...]
    tuples: Mapping[Key, int]
    after: frozenset[Key]

    @property
    def pays(self) -> bool:
        """Whether it is worth a call. What reads no tensor `torch.compile` leaves alone."""
        return bool(self.inputs) and sum(_fuses(op) for _, op in self.graph) >= LEAST_FUSED


def find_stretch(ops: Sequence[tuple[int, Op]], outside: set[Key], products: set[Key]) -> Stretch:
    """Steps 2 and 3. ops: (part, op) in order; outside: values of them that are read outside or kept;
    products: those that are matrix products to add to a gradient."""
    built = {(part, op.name) for part, op in ops}
    before = tuple((part, op) for part, op in ops if op.target == GETITEM and (part, op.uses[0]) not in built)
    given = {(part, op.name) for part, op in before}
    ops = [(part, op) for part, op in ops if (part, op.name) not in given]
    # 2. Backwards: what is read outside, and what it is made of.
    needed = set(outside)
    after: set[Key] = set()
    for part, op in reversed(ops):
        key = (part, op.name)
        if key in products or (key in needed and op.alias is not None):
            after.add(key)
            needed.update((part, name) for name in op.uses)
    # 3. The graph: what the outputs need, and nothing else.
    outputs: list[Key] = []
    tuples: dict[Key, int] = {}
    live: set[Key] = set()
    graph: list[tuple[int, Op]] = []
    for part, op in reversed(ops):
        key = (part, op.name)
        if key in needed and key not in after:
            if len(op.outputs) > 1:
                tuples[key] = len(op.outputs)
                outputs += [(part, f"{op.name}#{k}") for k in range(len(op.outputs))]
            else:
                outputs.append(key)
            live.add(key)
        if key in live:
            graph.append((part, op))
            live.update((part, name) for name in op.uses)
    graph.reverse()
    inside = {(part, op.name) for part, op in graph}
    inputs = dict.fromkeys((p, name) for p, op in graph for name in op.uses if (p, name) not in inside)
    return Stretch(before, tuple(inputs), tuple(graph), tuple(outputs), tuples, frozenset(after))


@dataclass(slots=True)
class Compiled:
    """A compiled graph: inputs in order -> outputs in order."""

    number: int
    function: Callable[..., tuple[torch.Tensor, ...]]
    compiler: Compiler

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _CALLING:
            meter = self.compiler.meter
            if meter is None:
                return self.function(*inputs)
            result: tuple[torch.Tensor, ...] = meter.outside(self.function, *inputs)
            return result


class Compiler:
    """Step 4: compiles graphs, each once. known: by their text, `calls` for how many stretches.

    Compiling happens at once, on zeros of the inputs' shapes, and not in the first step. Inductor keeps what
    it compiled on disk, for other processes and later runs.

    threads: ranks are threads of one process. PyTorch 2.13 counts for the process whether a call ran
    compiled, so it is not asked to refuse one that did not: that runs op by op, with equal numbers.
    """

    def __init__(self, device: torch.device, *, threads: bool = False) -> None:
        self._device = device
        self._threads = threads
        self.known: dict[str, Compiled] = {}
        self.calls = 0
        self.meter: MemoryMeter | None = None

    @contextmanager
    def metered(self, meter: MemoryMeter) -> Iterator[None]:
        """What compiled functions return is counted meanwhile."""
        self.meter = meter
        try:
            yield
        finally:
            self.meter = None

    def compiled(self, stretch: Stretch, specs: Iterable[TensorSpec]) -> Compiled:
        """The function of a stretch. specs: of its inputs, in order."""
        self.calls += 1
        specs = tuple(specs)
        graph = _graph(stretch, self._device)
        # Equal for stretches that are equal but for names.
        text = "\n".join([*map(str, specs), graph.code])
        if text not in self.known:
            with _CALLING, torch.no_grad():
                function = torch.compile(
                    graph, fullgraph=not self._threads, dynamic=False, backend="inductor"
                )
                function(*(_zeros(spec, self._device) for spec in specs))
            self.known[text] = Compiled(len(self.known), function, self)
        return self.known[text]


def _graph(stretch: Stretch, device: torch.device) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[Key, fx.Node] = {key: graph.placeholder(f"x{k}") for k, key in enumerate(stretch.inputs)}

    def given(part: int, arg: Arg) -> Any:
        return decoded(arg, lambda name: nodes[part, name], device)

    for part, op in stretch.graph:
        function = operator.getitem if op.target == GETITEM else resolve(op.target)
        arguments = tuple(given(part, arg) for arg in op.args)
        named = {name: given(part, arg) for name, arg in op.kwargs}
        nodes[part, op.name] = graph.call_function(function, arguments, named)
    results = []
    for part, name in stretch.outputs:
        made, _, at = name.partition("#")
        node = nodes[part, made]
        results.append(graph.call_function(operator.getitem, (node, int(at))) if at else node)
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _zeros(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    made = empty_of(spec, device)
    # An expanded tensor has fewer elements than its shape has.
    made.untyped_storage().fill_(0)  # type: ignore[attr-defined]
    return made


def make_compiler(how: str | None, device: torch.device, threads: bool) -> Compiler | None:
    """The one that `Runner(compile=...)` names. Raises UsageError for another, and where Inductor cannot
    compile for the device, with what to install.

    On processors it writes C++ and calls a compiler (the one that $CXX names, else g++ or clang++); on
    accelerators it writes Triton.
    """
    if how is None:
        return None
    if how != "inductor":
        raise UsageError(f'compile={how!r}: give compile="inductor", or leave it out to call op by op')
    named = os.environ.get("CXX", "").split()
    if device.type == "cpu" and not any(map(shutil.which, named[:1] or ("g++", "clang++"))):
        raise UsageError(
            'compile="inductor" needs a C++ compiler on this machine, and none was found: install g++ '
            "(Debian and Ubuntu: apt-get install g++) or clang, name it in $CXX, or leave compile out"
        )
    if device.type != "cpu" and importlib.util.find_spec("triton") is None:
        raise UsageError(
            f'compile="inductor" needs Triton for {device.type}, and it is not installed: install the triton '
            "that belongs to this PyTorch, or leave compile out"
        )
    return Compiler(device, threads=threads)


class CompiledWriter(Writer):
    """Writes stretches as calls, and all other items as they are."""

    def __init__(self, job: Job, window: Window, externals: Externals, compiler: Compiler) -> None:
        super().__init__(job, window, externals)
        self.compiler = compiler
        self.specs = specs_of(job)

    def items(self, last_item: Mapping[int, list[Key]]) -> None:
        last = {key: at for at, keys in last_item.items() for key in keys}
        for positions in cut(self.window, self.ops):
            stretch = self._stretch(positions, last) if len(positions) > 1 else None
            if stretch is None:
                for at in positions:
                    self.item(at)
                    self.delete(last_item.get(at, ()))
            else:
                self._call_compiled(stretch, self._ops(positions))
                self.delete(dict.fromkeys(key for at in positions for key in last_item.get(at, ())))

    def _ops(self, positions: Sequence[int]) -> list[tuple[int, Op]]:
        items = (self.window.items[at] for at in positions)
        return [(item.part, self.ops[self.window.parts[item.part][0], str(item.ref)]) for item in items]

    def _stretch(self, positions: Sequence[int], last: Mapping[Key, int]) -> Stretch | None:
        ops = self._ops(positions)
        products: set[Key] = set()
        outside: set[Key] = set()
        for part, op in ops:
            stage, phase = self.window.parts[part]
            key = (part, op.name)
            if self.is_product(op, stage):
                products.add(key)
                continue
            result = any(op.name in self.results[stage, sub] for sub in phase.programs)
            # What has no last use becomes a buffer when the window ends.
            if (
                result
                or last.get(key, positions[-1] + 1) > positions[-1]
                or self.later(stage, phase, op.name)
            ):
                outside.add(key)
        stretch = find_stretch(ops, outside, products)
        return stretch if stretch.pays else None

    def _call_compiled(self, stretch: Stretch, ops: Sequence[tuple[int, Op]]) -> None:
        self.enter(ops[0][0])
        for part, op in stretch.before:
            self.call(part, op)
            self.keep_results(part, op, *self.window.parts[part])
        arguments = [self.read(*key) for key in stretch.inputs]
        function = self.compiler.compiled(stretch, [self._spec(*key) for key in stretch.inputs])
        bound = self.bind("stretch", str(function.number), function)
        results = [self.name(*key) for key in stretch.outputs]
        self.line(f"{', '.join(results)}, = {bound}({', '.join(arguments)})")
        for (part, name), count in stretch.tuples.items():
            parts = [self.name(part, f"{name}#{k}") for k in range(count)]
            self.take(part, name, parts, ", ".join(parts))
        built = {*stretch.outputs, *stretch.tuples}
        for part, op in ops:
            stage, phase = self.window.parts[part]
            key = (part, op.name)
            if key in built:
                # Two results that are equal may be one tensor now.
                self.keep_results(part, op, stage, phase, may_own=False)
            elif key in stretch.after and self.is_product(op, stage):
                self.product(part, op, stage)
            elif key in stretch.after:
                self.call(part, op)
                self.keep_results(part, op, stage, phase, may_own=False)

    def _spec(self, part: int, name: str) -> TensorSpec:
        if name in self.externals.fixed:
            return spec_of(self.externals.fixed[name])
        return self.specs[name]

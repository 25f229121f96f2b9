"""A window's function whose stretches of compute are calls of compiled functions.

The order of communications, messages, draws and gradients is that of the plan, as in
`stretto.runtime.generate`; `stretto.runtime.compile` defines a stretch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.ir.plan import Window
from stretto.ir.prices import specs_of
from stretto.ir.program import Job, Op, TensorSpec
from stretto.runtime.compile import Compiler, Key, Stretch, cut, find_stretch
from stretto.runtime.generate import Externals, Generated, Writer


def generate_compiled(job: Job, window: Window, externals: Externals, compiler: Compiler) -> Generated:
    """Make the function of a window. externals: with all fixed tensors that the window's stages read."""
    return CompiledWriter(job, window, externals, compiler).write()


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
        """The stretch of these items when it is worth compiling."""
        ops = self._ops(positions)
        products: set[Key] = set()
        outside: set[Key] = set()
        for part, op in ops:
            stage, phase = self.window.parts[part]
            key = (part, op.name)
            if self.is_product(op, stage):
                products.add(key)
                continue
            result = any(op.name in self.results[stage, sub] for sub in phase.parts)
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
        """Shape, dtype and strides of a value that a stretch reads."""
        if name in self.externals.fixed:
            kept = self.externals.fixed[name]
            stride = None if kept.is_contiguous() else tuple(kept.stride())
            return TensorSpec(tuple(kept.shape), str(kept.dtype).removeprefix("torch."), stride)
        return self.specs[name]

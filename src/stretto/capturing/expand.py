"""Ops in which equal layers are one op each become the ops of the full step.

Given are the ops between the marks that `stretto.capturing.repeat` left:

    forward     enter ... the layer's ops ... leave              or  layer
    backward    leave_grad ... the layer's ops ... enter_grad    or  layer_grad

    1. Find the ops of each traced layer. What it makes is used by itself and through its marks only.
    2. The first traced layer of a kind is the second, op by op, but for names.
    3. In the place of `layer` and `layer_grad` come the first layer's ops, with the layer's own names.
    4. Marks go, values are named again in order, and it is noted again whose storage views share.

Where anything is otherwise, `NotRepeatedError` is raised, and all layers are traced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.capturing.equal import LayerCall, NotRepeatedError, renamed
from stretto.capturing.graph import GRAD, UPDATE
from stretto.capturing.repeat import MARKS, NAMESPACE
from stretto.ir.program import GETITEM, Constant, Op, TensorSpec
from stretto.passes.layout.program import Origin, StepProgram
from stretto.passes.rewrite import rooted, with_uses


@dataclass(slots=True)
class _Inside:
    """What is between a traced layer's marks. enter, leave_grad: place -> the mark, which the layer's ops
    use; leave, enter_grad: place -> the value that goes out."""

    forward: list[tuple[Op, Origin]]
    backward: list[tuple[Op, Origin]]
    enter: dict[int, str]
    leave: dict[int, str]
    leave_grad: dict[int, str]
    enter_grad: dict[int, str]


def expand(
    step: StepProgram, calls: Sequence[LayerCall], segments: Sequence[str], constants: Sequence[Constant]
) -> StepProgram:
    """The full step. calls: of equal layers, as the ops' marks number them. segments: the module of each.

    Raises NotRepeatedError when the layers cannot be repeated.
    """
    specs = {op.name: op.outputs for op, _ in step.ops}
    inside = {n: _inside(step.ops, n, call) for n, call in enumerate(calls) if call.template}
    _check_closed(step, calls, inside)
    _check_used_once(step, calls)
    first: dict[int, int] = {}
    values = {f"const/{c.name}": f"{c.spec} {c.data!r}" for c in constants}
    forms = {n: _form(step, calls[n], layer, specs, values) for n, layer in inside.items()}
    for number, call in enumerate(calls):
        one = first.setdefault(call.kind, number)
        if call.template and forms[one] != forms[number]:
            raise NotRepeatedError(f"{calls[one].layer} and {call.layer} are not the same ops")

    replaced_by: dict[str, str] = {}
    local: dict[int, dict[str, str]] = {}
    results: dict[str, tuple[int, list[str]]] = {}
    roots = dict(step.roots)
    made: list[tuple[Op, Origin]] = []

    def now(name: str) -> str:
        return replaced_by.get(name, name)

    def copy(number: int, ops: Sequence[tuple[Op, Origin]]) -> None:
        """Step 3. Names that are made here end in the call's number."""
        call, source = calls[number], calls[first[calls[number].kind]]
        names = local[number]
        names.update((op.name, f"{op.name}@{number}") for op, _ in ops)

        def name(old: str) -> str:
            return names.get(old) or _external(old, source.layer, call.layer)

        for op, (segment, backward) in ops:
            segment = None if segment is None else segment - source.begin + call.begin
            module = op.module if segment is None else segments[segment]
            made.append((replace(_with_names(op, name), module=module), Origin(segment, backward)))

    for op, origin in step.ops:
        word = _word(op)
        if word in MARKS:
            replaced_by[op.name] = now(op.args[0].name)
        elif word == "layer":
            number = op.args[1]
            like = inside[first[calls[number].kind]]
            given = enumerate(op.args[0])  # the exporter drops marks of what a layer does not use
            local[number] = {like.enter[at]: now(ref.name) for at, ref in given if at in like.enter}
            copy(number, like.forward)
            results[op.name] = number, [like.leave[at] for at in range(len(calls[number].outputs))]
        elif word == "layer_grad":
            _, number, which = op.args
            call, source = calls[number], calls[first[calls[number].kind]]
            like = inside[first[call.kind]]
            if set(which) != set(like.leave_grad) or set(call.grads) != set(like.enter_grad):
                raise NotRepeatedError(f"{call.layer} has other gradients than {source.layer}")
            for at, ref in zip(which, op.args[0], strict=True):
                _check_layout(call, specs, like.leave_grad[at], ref.name)
                local[number][like.leave_grad[at]] = now(ref.name)
            copy(number, like.backward)
            results[op.name] = number, [like.enter_grad[at] for at in call.grads]
            for parameter, value in _gradients(step).items():
                own = renamed(parameter, source.layer, call.layer)
                if own != parameter:
                    if f"{GRAD}{own}" in step.roots:
                        raise NotRepeatedError(f"{own} is used outside of its layer")
                    roots[f"{GRAD}{own}"] = local[number][value]
        elif op.target == GETITEM and op.args[0].name in results:
            number, values_out = results[op.args[0].name]
            value = values_out[op.args[1]]
            _check_layout(calls[number], specs, value, op.name)
            replaced_by[op.name] = local[number][value]
        else:
            made.append((_with_names(op, now), origin))

    return named(replace(step, roots=roots).with_ops(made, now))


def _gradients(step: StepProgram) -> dict[str, str]:
    """Parameter -> the value of its gradient."""
    return {root.removeprefix(GRAD): value for root, value in step.roots.items() if root.startswith(GRAD)}


def named(step: StepProgram) -> StepProgram:
    """Step 4, for any step: `mm`, `mm_1`, `mm_2` in order, so that names do not depend on how it was traced.

    Numbers begin where those of the trace did (`sum_1`: the exporter avoids the names of Python's own).
    """
    following: dict[str, int] = {}
    for base, number in (_parts(op.name) for op, _ in step.ops):
        following[base] = min(number, following.get(base, number))
    names: dict[str, str] = {}
    for op, _ in step.ops:
        base, _ = _parts(op.name)
        number = following[base]
        following[base] = number + 1
        names[op.name] = f"{base}_{number}" if number else base

    def final(value: str) -> str:
        return names.get(value, value)

    owned = rooted(_with_names(op, final) for op, _ in step.ops)
    return step.with_ops(zip(owned, (origin for _, origin in step.ops), strict=True), final)


def _word(op: Op) -> str:
    return op.target.split(".")[1] if op.target.startswith(f"{NAMESPACE}.") else ""


def _inside(ops: Sequence[tuple[Op, Origin]], number: int, call: LayerCall) -> _Inside:
    marks: dict[str, dict[int, int]] = {word: {} for word in MARKS}
    stray: list[int] = []
    for at, (op, origin) in enumerate(ops):
        word = _word(op)
        if word in MARKS:
            if op.args[1] == number:
                marks[word][op.args[2]] = at
        elif origin.segment is not None and call.begin <= origin.segment <= call.end:
            stray.append(at)
    enters, leaves = marks["enter"].values(), marks["leave"].values()
    if not enters or not leaves:
        raise NotRepeatedError(f"{call.layer} takes or returns no tensor")
    ends = [*marks["enter_grad"].values(), *(at for at in stray if ops[at][1].backward)]
    begin = min(marks["leave_grad"].values(), default=len(ops))
    regions = range(min(enters), max(leaves) + 1), range(begin, max(ends, default=begin - 1) + 1)
    parts: list[list[tuple[Op, Origin]]] = []
    own = {at for places in marks.values() for at in places.values()}
    for region, backward in zip(regions, (False, True), strict=True):
        part = [at for at in region if at not in own]
        for op, (segment, is_backward) in (ops[at] for at in part):
            foreign = not backward if segment is None else not call.begin <= segment <= call.end
            if foreign or is_backward is not backward or _word(op):
                raise NotRepeatedError(f"{op.name} is among the ops of {call.layer}")
        parts.append([ops[at] for at in part])
    if not all(any(at in region for region in regions) for at in stray):
        raise NotRepeatedError(f"ops of {call.layer} are outside of it")
    return _Inside(
        forward=parts[0],
        backward=parts[1],
        enter={place: ops[at][0].name for place, at in marks["enter"].items()},
        leave={place: ops[at][0].args[0].name for place, at in marks["leave"].items()},
        leave_grad={place: ops[at][0].name for place, at in marks["leave_grad"].items()},
        enter_grad={place: ops[at][0].args[0].name for place, at in marks["enter_grad"].items()},
    )


def _check_closed(step: StepProgram, calls: Sequence[LayerCall], inside: Mapping[int, _Inside]) -> None:
    """Step 1: what a layer uses is its own or goes in by a mark; what others use goes out by a mark."""
    home: dict[str, int] = {}
    for number, layer in inside.items():
        home.update((op.name, number) for op, _ in (*layer.forward, *layer.backward))
    for number, layer in inside.items():
        call = calls[number]
        marks = {*layer.enter.values(), *layer.leave_grad.values()}
        for op, _ in (*layer.forward, *layer.backward):
            for used in op.uses:
                if used in marks or home.get(used) == number or used.startswith(("buffer/", "const/")):
                    continue
                if not used.startswith("param/") or _external(used, call.layer, "") == used:
                    raise NotRepeatedError(f"{call.layer} uses {used}, which is no argument of it")
        for value in (*layer.leave.values(), *layer.enter_grad.values()):
            if value not in marks and home.get(value) != number:
                raise NotRepeatedError(f"{call.layer} returns {value}, which is not its own")
        for parameter, gradient in _gradients(step).items():
            own = renamed(parameter, call.layer, "") != parameter
            if own is not (gradient in marks or home.get(gradient) == number):
                raise NotRepeatedError(f"the gradient of {parameter} does not arise in the layer that has it")
    for op, _ in step.ops:
        at = home.get(op.name)
        if at is None and _word(op) in MARKS:
            at = op.args[1]
        for used in op.uses:
            if used in home and home[used] != at:
                raise NotRepeatedError(f"{used} is used outside of {calls[home[used]].layer}")
    for root, value in step.roots.items():
        is_update = any(renamed(root, f"{UPDATE}{call.layer}", "") != root for call in calls)
        if is_update or (value in home and not root.startswith(GRAD)):
            raise NotRepeatedError(f"{root} is made in a layer")


def _check_used_once(step: StepProgram, calls: Sequence[LayerCall]) -> None:
    """What goes into a layer, and has a gradient, goes nowhere else: else its gradient is a sum with terms
    from outside, which a trace of all layers may add in another order. (No gradient comes from a detach.)"""
    forward = [op for op, at in step.ops if not at.backward and op.target != "aten.detach.default"]
    users = Counter(used for op in forward for used in op.uses)
    for op, _ in step.ops:
        word = _word(op)
        if word not in ("enter", "layer"):
            continue
        call = calls[op.args[1]]
        given = {op.args[2]: op.args[0]} if word == "enter" else dict(enumerate(op.args[0]))
        if any(users[given[at].name] > 1 for at in call.grads if at in given):
            raise NotRepeatedError(f"an argument of {call.layer} is used elsewhere, too")


def _form(
    step: StepProgram,
    call: LayerCall,
    inside: _Inside,
    specs: Mapping[str, tuple[TensorSpec | None, ...]],
    constants: Mapping[str, str],
) -> object:
    """Step 2: a traced layer without its own names; equal ones are the same ops. constants: name -> its
    value, as a text."""
    given = {mark: f"given {at}" for at, mark in inside.enter.items()}
    given |= {mark: f"gradient {at}" for at, mark in inside.leave_grad.items()}
    names = {**constants, **given}

    def name(value: str) -> str:
        return names.get(value) or _external(value, call.layer, "")

    ops = []
    for at, (op, (segment, backward)) in enumerate((*inside.forward, *inside.backward)):
        names[op.name] = f"op {at}"
        op = replace(_with_names(op, name), module=renamed(op.module, call.layer, ""))
        ops.append((op, segment if segment is None else segment - call.begin, backward))
    results = [{at: name(value) for at, value in made.items()} for made in (inside.leave, inside.enter_grad)]
    own = {p: value for p, value in _gradients(step).items() if renamed(p, call.layer, "") != p}
    grads = {renamed(p, call.layer, ""): name(value) for p, value in own.items()}
    return {what: specs[mark] for mark, what in given.items()}, ops, results, grads


def _check_layout(
    call: LayerCall, specs: Mapping[str, tuple[TensorSpec | None, ...]], value: str, other: str
) -> None:
    if specs.get(value) != specs.get(other):
        raise NotRepeatedError(f"{call.layer}: {other} has another layout than {value}")


def _external(name: str, source: str, target: str) -> str:
    kind, slash, rest = name.partition("/")
    return kind + slash + renamed(rest, source, target) if slash else name


def _with_names(op: Op, name: Callable[[str], str]) -> Op:
    alias = None if op.alias is None else name(op.alias)
    return replace(with_uses(op, name), name=name(op.name), alias=alias)


_NUMBERED = re.compile(r"^(.+?)(?:_(\d+))?$")


def _parts(name: str) -> tuple[str, int]:
    result = _NUMBERED.match(name.partition("@")[0])
    assert result is not None
    return result[1], int(result[2] or 0)

"""Random edits of what a plan file computes: arguments, constants, parts, strides, gradients, dtypes, ops.

Each takes a file's data and a source of chance, changes one thing, and says what; "" where the plan has no
place for it. All that is made is a file that can be read as JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Data = dict[str, Any]
Edit = Callable[[Data, Random], str]

PHASES = ("F", "I", "W")
DTYPES = ("float64", "float32", "bfloat16", "int64", "bool")


def programs(data: Data, *phases: str) -> Iterator[tuple[int, str, list[Any]]]:
    for stage in data["job"]["stages"]:
        for phase, ops in stage["ops"].items():
            if phase in (phases or PHASES):
                yield stage["index"], phase, ops


def ops_of(data: Data, *phases: str) -> list[list[Any]]:
    return [op for *_, ops in programs(data, *phases) for op in ops]


def picked(chance: Random, found: list[Any]) -> Any:
    return chance.choice(found) if found else None


def extra(op: list[Any]) -> dict[str, Any]:
    """The op's fields that are not at their defaults."""
    if len(op) < 6:
        op.append({})
    found: dict[str, Any] = op[5]
    return found


def arguments(value: Any) -> Iterator[tuple[list[Any], int]]:
    """(list, index) of every argument that is no list."""
    for at, part in enumerate(value):
        if isinstance(part, list):
            yield from arguments(part)
        else:
            yield value, at


def number(data: Data, chance: Random) -> str:
    """An argument that is a number or a flag is another."""
    found = [(op, *place) for op in ops_of(data) for place in (*arguments(op[2]), *arguments(op[3]))]
    found = [(op, owner, at) for op, owner, at in found if isinstance(owner[at], (bool, int, float))]
    if not found:
        return ""
    op, owner, at = chance.choice(found)
    was = owner[at]
    if isinstance(was, bool):
        owner[at] = not was
    elif isinstance(was, int):
        owner[at] = chance.choice([was + 1, was - 1, -was, 0, 1, 2 * was, 10**12])
    else:
        owner[at] = chance.choice([was * 2, -was, 0.0, was + 1e-3, "nan"])
    return f"{op[0]} {op[1]}: {was} becomes {owner[at]}"


def norm_flag(data: Data, chance: Random) -> str:
    """A flag of a norm, of its forward or its backward, is the other."""
    found = [op for op in ops_of(data) if "norm" in op[1]]
    places = [(op, *place) for op in found for place in arguments(op[2])]
    places = [(op, owner, at) for op, owner, at in places if isinstance(owner[at], bool)]
    if not places:
        return ""
    op, owner, at = chance.choice(places)
    owner[at] = not owner[at]
    return f"{op[0]} {op[1]}: flag {at}"


def other_value(data: Data, chance: Random) -> str:
    """An op reads another value."""
    ops = ops_of(data)
    found = [(op, *place) for op in ops for place in arguments(op[2])]
    found = [(op, h, at) for op, h, at in found if isinstance(h[at], str) and h[at].startswith("%")]
    if not found:
        return ""
    op, owner, at = chance.choice(found)
    given = [f"%param/{p['name']}" for p in data["job"]["parameters"]]
    owner[at], was = chance.choice([f"%{chance.choice(ops)[0]}", chance.choice(given)]), owner[at]
    return f"{op[0]} {op[1]}: {was} becomes {owner[at]}"


def arguments_change(data: Data, chance: Random) -> str:
    """Two arguments change places, or one is gone, doubled or null."""
    op = picked(chance, [op for op in ops_of(data) if len(op[2]) > 1])
    if op is None:
        return ""
    one, other = chance.sample(range(len(op[2])), 2)
    how = chance.choice(["swap", "drop", "double", "null", "text"])
    if how == "swap":
        op[2][one], op[2][other] = op[2][other], op[2][one]
    elif how == "drop":
        op[2].pop()
    elif how == "double":
        op[2].append(op[2][one])
    else:
        op[2][one] = None if how == "null" else "'sum"
    return f"{op[0]} {op[1]}: {how} {one} {other}"


def keyword(data: Data, chance: Random) -> str:
    op = picked(chance, [op for op in ops_of(data) if op[3]])
    if op is None:
        return ""
    if chance.random() < 0.5:
        gone = op[3].pop(chance.randrange(len(op[3])))
        return f"{op[0]} {op[1]}: without {gone}"
    op[3][0][1] = chance.choice([None, True, 0.5, "'none", "@dtype:float32", "%tangent"])
    return f"{op[0]} {op[1]}: {op[3][0]}"


FUNCTIONS = (
    "aten.sin.default",
    "aten.relu.default",
    "aten.mul.Tensor",
    "aten.mul_.Tensor",
    "aten.zero_.default",
    "aten.copy_.default",
    "aten.detach.default",
    "aten.clone.default",
    "aten.empty_like.default",
    "aten.rand_like.default",
    "aten.from_file.default",
    "aten.save.default",
    "aten.manual_seed.default",
    "aten.set_num_threads.default",
    "prims.sin.default",
    "profiler._record_function_enter.default",
    "nothing.at_all.default",
)


def other_function(data: Data, chance: Random) -> str:
    """An op calls another function: one of another op, one that writes, reads files, draws."""
    ops = ops_of(data)
    op = chance.choice(ops)
    op[1], was = chance.choice([chance.choice(FUNCTIONS), chance.choice(ops)[1]]), op[1]
    return f"{op[0]}: {was} becomes {op[1]}"


def constant(data: Data, chance: Random) -> str:
    """An element of a constant, or of the loss's count, is another number."""
    found = [c for c in data["job"]["constants"] if c["data"]]
    if not found:
        return ""
    kept = chance.choice(found)
    at = chance.randrange(len(kept["data"]))
    was = kept["data"][at]
    kept["data"][at] = (not was) if isinstance(was, bool) else chance.choice([0, 1, 7])
    return f"constant {kept['name']}: {was} becomes {kept['data'][at]}"


def part(data: Data, chance: Random) -> str:
    """Another part of a tuple."""
    op = picked(chance, [op for op in ops_of(data) if op[1] == "getitem"])
    if op is None:
        return ""
    op[2][1] = chance.choice([op[2][1] + 1, op[2][1] - 1, 0, 10**9])
    return f"{op[0]}: part {op[2][1]}"


def specs(data: Data) -> list[tuple[str, Any, Any]]:
    """(what it is of, owner, key) of every tensor's text."""
    job = data["job"]
    found: list[tuple[str, Any, Any]] = [
        (f"{op[0]} {op[1]}", op[4], at) for op in ops_of(data) for at in range(len(op[4]))
    ]
    found += [(f"edge {edge['value']}", edge, "spec") for edge in job["edges"]] * 4
    found += [(f"parameter {p['name']}", p, "spec") for p in job["parameters"]] * 2
    found += [(f"buffer {b['name']}", b, "spec") for b in job["buffers"]]
    found += [(f"leaf {leaf[0]}", leaf, 1) for leaf in job["batch"]] * 2
    return [(of, owner, key) for of, owner, key in found if isinstance(owner[key], str)]


def parsed(text: str) -> tuple[str, list[int], list[int] | None]:
    dtype, _, rest = text.partition("[")
    shape, _, stride = rest.partition("]")

    def numbers(part: str) -> list[int]:
        return [int(n) for n in part.split(",") if n]

    return dtype, numbers(shape), numbers(stride.strip("{}")) if stride else None


def written(dtype: str, shape: list[int], stride: list[int] | None) -> str:
    text = f"{dtype}[{','.join(map(str, shape))}]"
    return text if stride is None else f"{text}{{{','.join(map(str, stride))}}}"


def stride(data: Data, chance: Random) -> str:
    found = [(of, h, k) for of, h, k in specs(data) if parsed(h[k])[1]]
    of, owner, key = chance.choice(found)
    was = owner[key]
    dtype, shape, steps = parsed(was)
    contiguous = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        contiguous[at] = contiguous[at + 1] * shape[at + 1]
    new = list(steps or contiguous)
    how = chance.choice(["reverse", "zero", "more", "none", "huge"])
    if how == "reverse":
        new.reverse()
    elif how == "none":
        owner[key] = written(dtype, shape, None)
        return f"{of}: {was} becomes {owner[key]}"
    else:
        new[chance.randrange(len(new))] = {"zero": 0, "more": 3, "huge": 10**9}[how]
    owner[key] = written(dtype, shape, new)
    return f"{of}: {was} becomes {owner[key]}"


def shape(data: Data, chance: Random) -> str:
    of, owner, key = chance.choice([(of, h, k) for of, h, k in specs(data) if parsed(h[k])[1]])
    was = owner[key]
    dtype, lengths, steps = parsed(was)
    at = chance.randrange(len(lengths))
    lengths[at] = chance.choice([lengths[at] + 1, 0, 1, 2 * lengths[at], 10**9])
    owner[key] = written(dtype, lengths, steps)
    return f"{of}: {was} becomes {owner[key]}"


def dtype(data: Data, chance: Random) -> str:
    job = data["job"]
    if chance.random() < 0.2 and job["parameters"]:
        parameter = chance.choice(job["parameters"])
        parameter["own_dtype"] = chance.choice(DTYPES)
        return f"parameter {parameter['name']}: own_dtype {parameter['own_dtype']}"
    of, owner, key = chance.choice(specs(data))
    was = owner[key]
    _, lengths, steps = parsed(was)
    owner[key] = written(chance.choice(DTYPES), lengths, steps)
    return f"{of}: {was} becomes {owner[key]}"


def dtype_argument(data: Data, chance: Random) -> str:
    places = [(op, *place) for op in ops_of(data) for place in (*arguments(op[2]), *arguments(op[3]))]
    places = [(op, h, at) for op, h, at in places if isinstance(h[at], str) and h[at].startswith("@")]
    if not places:
        return ""
    op, owner, at = chance.choice(places)
    others = [*(f"@dtype:{name}" for name in DTYPES), "@dtype:load", "@device:cuda", "@layout:sparse_coo"]
    owner[at], was = chance.choice(others), owner[at]
    return f"{op[0]} {op[1]}: {was} becomes {owner[at]}"


def gradient(data: Data, chance: Random) -> str:
    """A parameter's gradients: one twice, none, of another stage or phase, another value."""
    trained = [p for p in data["job"]["parameters"] if p["grads"]]
    if not trained:
        return ""
    parameter = chance.choice(trained)
    how = chance.choice(["twice", "none", "stage", "phase", "value"])
    grads = parameter["grads"]
    if how == "twice":
        grads.append(list(grads[0]))
    elif how == "none":
        grads.clear()
    elif how == "stage":
        grads[0][0] = chance.choice([grads[0][0] + 1, 0, -1])
    elif how == "phase":
        grads[0][1] = chance.choice(["F", "I", "W", "B"])
    else:
        grads[0][2] = chance.choice(ops_of(data))[0]
    return f"gradient of {parameter['name']}: {how}"


def exchanged(data: Data, chance: Random) -> str:
    """Two parameters exchange their gradients, or one gets those of both."""
    trained = [p for p in data["job"]["parameters"] if p["grads"]]
    if len(trained) < 2:
        return ""
    one, other = chance.sample(trained, 2)
    one["grads"], other["grads"] = chance.choice(
        [(other["grads"], one["grads"]), ([], [*other["grads"], *one["grads"]])]
    )
    return f"gradients of {one['name']} and {other['name']}: {one['grads']}, {other['grads']}"


def parameter(data: Data, chance: Random) -> str:
    """A parameter: twice, gone, of other stages, tied to another, in other shards."""
    kept = data["job"]["parameters"]
    if not kept:
        return ""
    one = chance.choice(kept)
    how = chance.choice(["twice", "gone", "none", "stage", "tied", "frozen", "partial", "shard", "name"])
    if how == "twice":
        kept.insert(chance.randrange(len(kept) + 1), copy.deepcopy(one))
    elif how == "gone":
        kept.remove(one)
    elif how == "none":
        one["stages"] = []
    elif how == "stage":
        one["stages"] = chance.choice(
            [[one["stages"][0] + 1] if one["stages"] else [0], [0, 0], [0, 1], [-1]]
        )
    elif how == "tied":
        one["tied_to"] = chance.choice(kept)["name"]
    elif how == "frozen":
        one["frozen"] = not one["frozen"]
    elif how == "partial":
        one["partial"] = [] if one["partial"] else [chance.choice(["tp", "dp", "ep"])]
    elif how == "shard":
        one["shards"] = [] if one["shards"] else [[chance.choice(["tp", "dp"]), chance.choice([0, 1]), 1]]
    else:
        one["name"] = chance.choice(kept)["name"]
    return f"parameter {one['name']}: {how}"


def buffer(data: Data, chance: Random) -> str:
    kept = data["job"]["buffers"]
    if not kept:
        return ""
    one = chance.choice(kept)
    how = chance.choice(["twice", "none", "no stages", "value", "doubled"])
    if how == "twice":
        one["updates"] = one["updates"] * 2
    elif how == "none":
        one["updates"] = []
    elif how == "no stages":
        one["stages"] = []
    elif how == "doubled":
        kept.append(copy.deepcopy(one))
    elif one["updates"]:
        one["updates"][0][2] = chance.choice(ops_of(data, "F"))[0]
    return f"buffer {one['name']}: {how}"


def drop_op(data: Data, chance: Random) -> str:
    """An op is gone from its program; from windows and costs too, mostly."""
    stage, phase, ops = chance.choice([found for found in programs(data) if found[2]])
    op = chance.choice(ops)
    ops.remove(op)
    if chance.random() < 0.8:
        for window in data["windows"].values():
            marks = {
                (f"#{at} " if at else "") + op[0]
                for at, (of, runs) in enumerate(window["parts"])
                if of == stage and (runs == phase or (runs == "B" and phase != "F"))
            }
            window["items"] = [item for item in window["items"] if item not in marks]
        for key in ("op_us", "op_how"):
            rows = data["costs"][key]
            data["costs"][key] = [row for row in rows if row[:2] != [stage, op[0]]]
    return f"{op[0]} {op[1]} of {stage}{phase} is gone"


def double_op(data: Data, chance: Random) -> str:
    """An op is there twice, under its name or another; in windows too, mostly."""
    stage, phase, ops = chance.choice([found for found in programs(data) if found[2]])
    at = chance.randrange(len(ops))
    again = copy.deepcopy(ops[at])
    if chance.random() < 0.8:
        again[0] += "_again"
        for window in data["windows"].values():
            for number, (of, runs) in enumerate(window["parts"]):
                mark = f"#{number} " if number else ""
                if of == stage and (runs == phase or (runs == "B" and phase != "F")):
                    first = mark + ops[at][0]
                    if first in window["items"]:
                        window["items"].insert(window["items"].index(first) + 1, mark + again[0])
        if chance.random() < 0.5:
            for reader in ops[at + 1 :]:
                reader[2] = [f"%{again[0]}" if arg == f"%{ops[at][0]}" else arg for arg in reader[2]]
    ops.insert(at + 1, again)
    return f"{ops[at][0]} {ops[at][1]} of {stage}{phase} is there again as {again[0]}"


def move_op(data: Data, chance: Random) -> str:
    """An op is in another program of its stage."""
    stage = chance.choice(data["job"]["stages"])
    one, other = chance.sample(PHASES, 2)
    if not stage["ops"][one]:
        return ""
    op = stage["ops"][one].pop(chance.randrange(len(stage["ops"][one])))
    stage["ops"][other].append(op)
    return f"{op[0]} moves from {one} to {other}"


def said(data: Data, chance: Random) -> str:
    """What an op says of itself: that it draws, is a view, repeats another."""
    op = chance.choice(ops_of(data))
    how = chance.choice(["random", "alias", "repeats", "flops", "module"])
    kept = extra(op)
    if how == "random":
        kept["random"] = not kept.get("random", False)
    elif how == "flops":
        kept["flops"] = chance.choice([0, 1, 10**20])
    elif how == "module":
        kept["module"] = "elsewhere"
    elif kept.get(how) and chance.random() < 0.5:
        del kept[how]
    else:
        others = [*ops_of(data)] + [[f"param/{p['name']}"] for p in data["job"]["parameters"]] * 5
        kept[how] = chance.choice(others)[0]
    return f"{op[0]} {op[1]}: {how} {kept.get(how)}"


def view_said(data: Data, chance: Random) -> str:
    """A view says that it is none: what becomes a gradient as it is would be written over its source."""
    op = picked(chance, [op for op in ops_of(data) if len(op) > 5 and op[5].get("alias")])
    if op is None:
        return ""
    del op[5]["alias"]
    return f"{op[0]} {op[1]}: no view"


ONCE = "REDUCE_GRAD"


def once_a_step(data: Data, chance: Random) -> str:
    """In a program that runs once a step: what an op reads, writes, is a view of; a number; an op is gone,
    there twice, or elsewhere in its program."""
    found = [ops for *_, ops in programs(data, ONCE) if ops]
    if not found:
        return ""
    ops = chance.choice(found)
    at = chance.randrange(len(ops))
    op = ops[at]
    how = chance.choice(["reads", "reads", "writes", "writes", "alias", "number", "target", "gone", "moves"])
    state = [f"grad/{p['name']}" for p in data["job"]["parameters"]] + ["step/loss"]
    names = [*state, *(one[0] for one in ops)]
    places = list(arguments(op[2]))
    if how == "reads":
        places = [(h, k) for h, k in places if isinstance(h[k], str) and h[k].startswith("%")]
        if not places:
            return ""
        owner, k = chance.choice(places)
        old, new = owner[k][1:], chance.choice(names)
        owner[k] = f"%{new}"
        if extra(op).get("alias") == old and chance.random() < 0.7:
            extra(op)["alias"] = new
    elif how == "writes":
        extra(op)["writes"] = [chance.choice(state)]
    elif how == "alias":
        extra(op)["alias"] = chance.choice(names)
    elif how == "number":
        places = [(h, k) for h, k in places if isinstance(h[k], int)]
        if not places:
            return ""
        owner, k = chance.choice(places)
        owner[k] += chance.choice([-1, 1, 2])
    elif how == "target":
        op[1] = chance.choice([one[1] for one in ops] + ["aten.neg.default", "state.free"])
    elif how == "gone":
        ops.remove(op)
        for window in data["windows"].values():
            window["items"] = [item for item in window["items"] if item.split(" ")[-1] != op[0]]
    else:
        ops.insert(chance.randrange(len(ops)), ops.pop(at))
    return f"{op[0]} {op[1]} once a step: {how} {op[2]} {extra(op)}"


def reduction(data: Data, chance: Random) -> str:
    """A collective's reduction, axis or size; or something else of what runs once a step."""
    if chance.random() < 0.5:
        return once_a_step(data, chance)
    op = picked(chance, [op for op in ops_of(data, *PHASES, ONCE) if op[1].startswith("comm.")])
    if op is None or op[1] == "comm.wait":
        return ""
    how = chance.choice(["kind", "kind", "axis", "size", "what"])
    at = next((k for k, arg in enumerate(op[2]) if arg in ("'sum", "'max")), None)
    if how == "kind" and at is not None:
        op[2][at] = "'max" if op[2][at] == "'sum" else "'sum"
    elif how == "axis":
        op[2][-2] = chance.choice(["'dp", "'tp", "'ep"])
    elif how == "size":
        op[2][-1] = chance.choice([1, 2, 3, 4])
    else:
        op[1] = chance.choice(["comm.all_reduce", "comm.all_gather", "comm.reduce_scatter"])
    return f"{op[0]}: {how} {op[1]} {op[2][1:]}"


def loss(data: Data, chance: Random) -> str:
    job = data["job"]
    how = chance.choice(["value", "stage", "microbatches", "edge"])
    if how == "value":
        scalars = [op[0] for op in ops_of(data, "F") if op[4] and op[4][0] and "[]" in op[4][0]]
        job["loss"][1] = chance.choice(scalars or [job["loss"][1]])
    elif how == "stage":
        job["loss"][0] = chance.choice([0, 1, -1, 7])
    elif how == "microbatches":
        job["microbatches"] = chance.choice([1, 3, 10**9])
    elif job["edges"]:
        edge = chance.choice(job["edges"])
        key = chance.choice(["value", "source", "target", "phase", "user_phase"])
        new = {
            "value": chance.choice(ops_of(data))[0],
            "source": 0,
            "target": 1,
            "phase": "F",
            "user_phase": "W",
        }
        edge[key] = new[key]
    return f"{how}: {job['loss']}, {job['microbatches']}"


def count(data: Data, chance: Random) -> str:
    """What the loss is divided by: another number, none, another op."""
    job = data["job"]
    ops = job["count"]["ops"] if job["count"] else []
    if not ops or chance.random() < 0.5:
        job["count"] = chance.choice([None, {"value": 3.0, "ops": []}, {"value": -1.0, "ops": []}])
        return f"count: {job['count']}"
    op = chance.choice(ops)
    op[1] = chance.choice(
        ["aten.sum.default", "aten.neg.default", "aten.rand_like.default", "aten.sum.dim_IntList"]
    )
    return f"count: {op}"


EDITS: tuple[Edit, ...] = (
    number,
    norm_flag,
    other_value,
    arguments_change,
    keyword,
    other_function,
    constant,
    part,
    stride,
    shape,
    dtype,
    dtype_argument,
    gradient,
    exchanged,
    parameter,
    buffer,
    drop_op,
    double_op,
    move_op,
    said,
    view_said,
    reduction,
    loss,
    count,
)

FREE = frozenset(
    edit.__name__
    for edit in (
        *(number, norm_flag, other_value, arguments_change, keyword, other_function, constant),
        *(exchanged, count),
    )
)
"""Edits that may make another step that is as sound as the first: another number, value, function or count,
and the gradient of another parameter of the same shape."""

"""An optimizer's state by the parameters' names: written under one layout, it is read under another.

Ranks have other parameters under each layout, in groups that lack some or are absent. So all is stored under
names:

    1. Each rank collects for every parameter of its optimizer the options of the parameter's group, and what
       of its state is a number. Tensors of the state have the parts that the parameter has, or are
       replicated. Of an empty part nothing is collected, and nothing read.
    2. Rank 0 writes the options and numbers of all ranks in one table.
    3. A rank that reads gives each of its own groups the options that its parameters had, which must be the
       same for all of them; then PyTorch's own `Optimizer.load_state_dict` takes them and the tensors.
"""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from stretto.errors import UsageError, listed
from stretto.ir.program import Parameter
from stretto.runtime import Runner
from stretto.runtime.given_model_adapter import TakenValue
from stretto.runtime.rank_tensors import Part, full_spec

OWN_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options of how PyTorch computes, which the reading optimizer keeps: they change with device and layout."""

MEMBERS = ("params", "param_names")
"""What of a group is no option."""

Options = dict[str, Any]


@dataclass(slots=True)
class OptimizerTable:
    """kind: the optimizer's class. options: distinct options of groups. of: parameter -> index in `options`.
    numbers: parameter -> key -> what of its state is no tensor."""

    kind: str
    options: list[Options] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> OptimizerTable:
        """The table in a file. Raises ValueError, or another of reading what is not of its form."""
        table = OptimizerTable(**data)
        right = isinstance(table.kind, str) and all(
            isinstance(name, str) and type(at) is int and 0 <= at < len(table.options)
            for name, at in table.of.items()
        )
        values = [value for one in table.numbers.values() for value in one.values()]
        if not right or not all(value is None or isinstance(value, numbers.Number) for value in values):
            raise ValueError("the optimizer's options are not of their form")
        return table

    def add(self, name: str, options: Options, values: dict[str, Any]) -> None:
        """Raises UsageError where the parameter is in the table with other options."""
        at = next((k for k, one in enumerate(self.options) if _same(one, options)), None)
        if at is None:
            at = len(self.options)
            self.options.append(options)
        if self.of.setdefault(name, at) != at:
            raise UsageError(
                f"{name!r} is in groups of other options on two ranks, whose copies of it come apart: make "
                "the optimizer's groups on all ranks by what all copies have (its shape, its first name)"
            )
        if values:
            self.numbers[name] = values


def state_of(runner: Runner, optimizer: Optimizer) -> tuple[OptimizerTable, dict[str, Part]]:
    """Step 1: the table of a rank, and `optimizer.<name>.<key>` -> its part of that tensor. Raises UsageError
    for an optimizer over what is not the runner's, or state without a place."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer: expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    mine = {id(parameter): known for known, parameter in runner.tensors.known_parameters()}
    table = OptimizerTable(type(optimizer).__name__)
    tensors: dict[str, Part] = {}
    for group in optimizer.param_groups:
        options = {key: copy.deepcopy(value) for key, value in group.items() if key not in MEMBERS}
        for tensor in group["params"]:
            parameter = mine.get(id(tensor))
            state = optimizer.state.get(tensor, {})
            if parameter is None:
                if state or isinstance(tensor, TakenValue):
                    raise UsageError(
                        f"the optimizer has a parameter of shape {list(tensor.shape)} that is not the "
                        "Runner's: make it over runner.parameters()"
                    )
                continue
            values: dict[str, Any] = {}
            for key, value in state.items() if tensor.numel() else ():
                part = _part(runner, parameter, tensor, str(key), value)
                if part is None:
                    values[str(key)] = value
                else:
                    tensors[f"optimizer.{parameter.tied_to}.{key}"] = part
            table.add(parameter.tied_to, options, values)
    return table, tensors


def merged(tables: Sequence[OptimizerTable]) -> OptimizerTable:
    """Step 2, of all ranks' tables. Raises UsageError where copies of a parameter are treated differently."""
    table = OptimizerTable(tables[0].kind)
    for one in tables:
        for name, at in one.of.items():
            table.add(name, one.options[at], one.numbers.get(name, {}))
    return table


def _part(runner: Runner, parameter: Parameter, tensor: torch.Tensor, key: str, value: Any) -> Part | None:
    """None for a number. tensor: what the rank has of the parameter."""
    if value is None or isinstance(value, numbers.Number):
        return None
    what = f"the optimizer's state {key!r} of {parameter.name!r}"
    if not isinstance(value, torch.Tensor) or "." in key:
        raise UsageError(f"{what} ({type(value).__name__}) is no tensor and no number, and cannot be saved")
    if value.shape == tensor.shape:
        return runner.tensors.part(parameter, value)
    if parameter.tied_to in runner.tensors.cut_along and value.numel() > 1:
        raise UsageError(
            f"{what} has the shape {list(value.shape)}, and this rank's part of the parameter "
            f"{list(tensor.shape)}: where it belongs in the full tensor is not known. Take an "
            "optimizer whose state has the parameter's shape (AdamW, SGD), or a layout in which ranks have "
            "all of it (tp = 1, zero = 0)"
        )
    return Part.all_of(value)


# Step 3.


def new_tensors(
    runner: Runner, optimizer: Optimizer, stored: Iterable[tuple[str, tuple[int, ...], torch.dtype]]
) -> dict[str, tuple[torch.Tensor, Part]]:
    """For each stored tensor of a parameter that this rank's optimizer has: a new one to read it into.

    stored: (`optimizer.<name>.<key>`, full shape, dtype).
    """
    mine = _members(runner, optimizer)
    tensors: dict[str, tuple[torch.Tensor, Part]] = {}
    for full, shape, dtype in stored:
        name, _ = name_and_key(full)
        if name not in mine or not mine[name][1].numel():
            continue
        parameter, tensor = mine[name]
        if shape == full_spec(runner.plan.job, parameter).shape:
            made = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
            tensors[full] = made, runner.tensors.part(parameter, made)
        else:
            made = torch.zeros(shape, dtype=dtype, device=tensor.device)
            tensors[full] = made, Part.all_of(made)
    return tensors


def check_kind(optimizer: Optimizer, table: OptimizerTable) -> None:
    """Raises UsageError where the optimizer is of another class."""
    kind = type(optimizer).__name__
    if kind != table.kind:
        raise UsageError(
            f"the checkpoint has the state of {table.kind}, and this optimizer is {kind}: make a "
            f"{table.kind} (of a run: optimizer.name), or load without the optimizer"
        )


def options_for(runner: Runner, optimizer: Optimizer, table: OptimizerTable) -> list[Options | None]:
    """The saved options of each of the optimizer's groups; None where none of its parameters was saved.

    Raises UsageError where one of its groups has parameters that were in groups of other options.
    """
    names = {id(tensor): name for name, (_, tensor) in _members(runner, optimizer).items()}
    options: list[Options | None] = []
    for number, group in enumerate(optimizer.param_groups):
        members = [names[id(p)] for p in group["params"] if id(p) in names and names[id(p)] in table.of]
        first = members[0] if members else None
        for other in members[1:]:
            if first is not None and table.of[other] != table.of[first]:
                one, two = table.options[table.of[first]], table.options[table.of[other]]
                key = next(k for k in {**one, **two} if not _same(one.get(k), two.get(k)))
                raise UsageError(
                    f"group {number} of the optimizer has {first!r} and {other!r}, which were saved in "
                    f"groups of their own ({key} = {one.get(key)!r} and {two.get(key)!r}): make the "
                    "optimizer with the groups that it had"
                )
        options.append(None if first is None else table.options[table.of[first]])
    return options


def install(
    runner: Runner,
    optimizer: Optimizer,
    tensors: dict[str, torch.Tensor],
    table: OptimizerTable,
    options: Sequence[Options | None],
) -> None:
    """Give the optimizer its state and options, by PyTorch's own `load_state_dict`."""
    state: dict[str, dict[str, Any]] = {}
    for full, tensor in tensors.items():
        name, key = name_and_key(full)
        state.setdefault(name, {})[key] = tensor
    for name, values in table.numbers.items():
        state.setdefault(name, {}).update(values)
    names = {id(tensor): name for name, (_, tensor) in _members(runner, optimizer).items()}
    packed = optimizer.state_dict()
    packed["state"] = {}
    for group, own, saved in zip(packed["param_groups"], optimizer.param_groups, options, strict=True):
        if saved is not None:
            group.update({key: value for key, value in saved.items() if key not in OWN_OPTIONS})
        for number, tensor in zip(group["params"], own["params"], strict=True):
            saved_state = state.get(names.get(id(tensor), "")) if tensor.numel() else None
            if saved_state:
                packed["state"][number] = saved_state
    optimizer.load_state_dict(packed)


def warn_of_differences(runner: Runner, optimizer: Optimizer, table: OptimizerTable) -> None:
    """Warn, on rank 0, of parameters that only the checkpoint or only this optimizer has; all call it."""
    gathered = runner.transport.all_gather(sorted(_members(runner, optimizer)))
    here = {name for names in gathered for name in names}
    lost, new = sorted(table.of.keys() - here), sorted(here - table.of.keys())
    if lost and runner.rank == 0:
        what = f"the saved state of {listed(map(repr, lost))} was left: the optimizer has no such parameter"
        warnings.warn(what, stacklevel=4)
    if new and runner.rank == 0:
        what = f"{listed(map(repr, new))} begin without state: the saved optimizer had no such parameter"
        warnings.warn(what, stacklevel=4)


def _members(runner: Runner, optimizer: Optimizer) -> dict[str, tuple[Parameter, torch.Tensor]]:
    """First name of the tie -> the parameter, for those of the runner's that the optimizer has."""
    within = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        known.name: (known, parameter)
        for known, parameter in runner.tensors.known_parameters()
        if id(parameter) in within
    }


def name_and_key(full: str) -> tuple[str, str]:
    """Of `optimizer.<name>.<key>`."""
    name, _, key = full.removeprefix("optimizer.").rpartition(".")
    return name, key


def _same(one: Any, two: Any) -> bool:
    """Equality of options, among which there may be tensors."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and bool((one.cpu() == two.cpu()).all())
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return False
    if isinstance(one, tuple | list) and isinstance(two, tuple | list):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)

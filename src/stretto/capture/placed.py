"""A traced step with the stages of its ops, as what cuts borders asks about it (`capture.borders`).

Touches traced ops and their placement only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stretto.capture.expand import TracedOp
from stretto.capture.split import Placement
from stretto.capture.trace import Traced
from stretto.ir.placed_programs import differing
from stretto.ir.program import TensorSpec
from stretto.parallelize.tensor import AXIS

ADD = "aten.add.Tensor"


@dataclass(slots=True)
class PlacedStep:
    """size: of the axis. items: op's name -> the op; users: value -> the ops that read it.
    specs: of values that are one tensor. differs: values that are not equal on all ranks of the axis.
    roots: values that must stay.
    sums: gradients of parameters, and what they are sums of, which is taken apart where stages are cut.
    own_grads: gradients that are of one parameter alone, which all ranks hold whole -> the parameter.
    """

    traced: Traced
    placement: Placement
    size: int
    items: dict[str, TracedOp] = field(init=False)
    users: Mapping[str, list[TracedOp]] = field(init=False)
    differs: set[str] = field(init=False)
    specs: dict[str, TensorSpec] = field(init=False)
    roots: set[str] = field(init=False)
    sums: set[str] = field(init=False)
    own_grads: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        traced = self.traced
        self.items = {item.op.name: item for item in traced.ops}
        users: dict[str, list[TracedOp]] = defaultdict(list)
        for item in traced.ops:
            for name in item.op.uses:
                users[name].append(item)
        self.users = users
        self.specs = {f"param/{name}": spec for name, (spec, _, _) in traced.parameters.items()}
        self.specs |= {f"buffer/{name}": spec for name, (spec, _) in traced.buffers.items()}
        self.specs |= {f"batch/{name}": spec for name, spec in traced.batch}
        self.specs |= {f"const/{constant.name}": constant.spec for constant in traced.constants}
        self.specs["tangent"] = TensorSpec((), traced.param_dtype or "float32")
        program = [(item.op, item.backward) for item in traced.ops]
        self.differs = differing([program], self.specs, traced.shards, AXIS, self.size)
        grads = (grad for _, _, grad in traced.parameters.values())
        updates = (update for _, update in traced.buffers.values())
        self.roots = {traced.loss, *(name for name in (*grads, *updates) if name is not None)}
        self.sums = set()
        for _, _, grad in traced.parameters.values():
            if grad is not None:
                self._find_sums(grad)
        ties = Counter(tied_to for _, tied_to, _ in traced.parameters.values())
        self.own_grads = {
            grad: name
            for name, (_, tied_to, grad) in traced.parameters.items()
            if grad is not None and ties[tied_to] == 1 and name not in traced.shards
        }

    def _find_sums(self, name: str) -> None:
        if name in self.items and name not in self.sums:
            self.sums.add(name)
            op = self.items[name].op
            for term in op.uses if op.target == ADD else ():
                self._find_sums(term)

    def crossing(self) -> Iterator[str]:
        """Values that leave the stage that makes them, and are equal on all ranks."""
        for item in self.traced.ops:
            op = item.op
            homes = self.placement[op.name]
            stays = op.name in self.roots or op.name in self.sums or op.name in self.differs
            if len(homes) != 1 or stays:
                continue
            # What is cheap may be computed in several stages; it reads what all of them have.
            read_in = [self.placement[user.op.name] for user in self.users.get(op.name, ())]
            alone = read_in and all(len(stages) == 1 and stages != homes for stages in read_in)
            if alone and len(op.outputs) == 1 and op.outputs[0] is not None:
                yield op.name

    def readers(self, name: str, stage: int) -> list[TracedOp]:
        """What reads a value in a stage, in order."""
        return [user for user in self.users[name] if stage in self.placement[user.op.name]]

    def only_reader(self, name: str) -> bool:
        """Whether one op reads a value, once."""
        found = self.users.get(name, ())
        return len(found) == 1 and name not in self.roots

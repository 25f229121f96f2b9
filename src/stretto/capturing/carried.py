"""What one call of the forward leaves in Python, and whether the next one reads it.

The step of a plan runs one captured forward for every microbatch. That is the plain model's only if no call
reads what the call before it has left (buffers apart, which are inputs of the graph). So every run of the
forward begins with the state of the user's model, and where it leaves another:

    1. The forward is captured again from what it has left.
    2. The nodes of both graphs get numbers: that of the op with the numbers of its arguments.
    3. A tensor that the first call left has in the second graph the number of its value in the first, if that
       depends on constants alone (a mask that is kept for the next call); else it has none of its own.
    4. The loss, gradients and updates must have the same numbers in both.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg

from stretto.capturing.calls_adapter import constant_key, draws, nodes_of
from stretto.capturing.equal import LayerCall, NotRepeatedError
from stretto.capturing.graph import JointGraph
from stretto.capturing.read import Reads
from stretto.capturing.state import PythonState
from stretto.errors import CaptureError, listed


class ForwardCalls:
    """The state of model and loss around each run of the forward. When the context ends, it is as before."""

    def __init__(self, model: nn.Module, loss: Any, layers: Sequence[LayerCall] = ()) -> None:
        self._roots = (("", model), ("the loss", loss))
        self.reads = Reads(model, loss)
        self.layers = layers
        self._known: dict[Hashable, int] = {}
        self._numbers: dict[int, int] = {}
        self._left: dict[str, Tensor] = {}

    def __enter__(self) -> ForwardCalls:
        self._first = self._begin = PythonState(*self._roots)
        self._generators = _generators()
        return self

    def __exit__(self, *_: object) -> None:
        self._first.restore()
        random.setstate(self._generators["Python's random"])
        if "numpy.random" in self._generators:
            sys.modules["numpy"].random.set_state(self._generators["numpy.random"])

    @contextmanager
    def one(self, left: Mapping[str, Tensor | None]) -> Iterator[None]:
        """Around one run. left: the substitutes of tensors that an earlier call left, by the names that
        `check` gave them."""
        others = {id(tensor): left[name] for name, tensor in self._left.items()}
        self._begin.restore(running=True, others=others)
        before = _generators()
        with self.reads.recording(self._first.objects(), self.layers):
            yield
        after = _generators()
        drawn = next((k for k in after if pickle.dumps(before.get(k)) != pickle.dumps(after[k])), None)
        if drawn is not None:
            raise CaptureError(
                f"the forward draws from {drawn}, and the draw would be a constant of the plan: draw with "
                "torch (torch.rand, torch.bernoulli), and choose with torch.where"
            )
        if self._begin is self._first and self._first.changes():
            self._number_left()

    def substitutes(self, left: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(substitute, the tensor that an earlier call left), by the names of `one`."""
        return [(left[name], tensor) for name, tensor in self._left.items()]

    def _number_left(self) -> None:
        under_way = nodes_of(self._new_tensors(self._first.again()))
        if under_way is not None:
            graph, owner, nodes = under_way
            result = self._numbered(graph, owner, {})
            made = {key: result[node] for key, node in nodes.items()}
            self._numbers = {key: number for key, (number, constant) in made.items() if constant}

    def _new_tensors(self, state: PythonState) -> dict[int, Tensor]:
        known = self._first.tensors()
        return {key: tensor for key, tensor in state.tensors().items() if key not in known}

    def check(
        self,
        joint: JointGraph,
        export: Callable[[Mapping[str, Tensor]], JointGraph],
        like: Callable[[Tensor], Tensor],
    ) -> None:
        """Steps 1 to 4. export: captures again, with tensors given as buffers by name; like: another tensor
        of the same shape and dtype.

        Raises CaptureError where a call reads what an earlier one left.
        """
        changed = self._first.changes()
        if not changed:
            return
        carried = CaptureError(
            f"the forward reads what an earlier call of it left in {listed(changed)}, and a "
            "plan hands on nothing but buffers from one microbatch to the next: let it keep that in a buffer "
            "(register_buffer) and write it in place (copy_, add_), or leave it out"
        )
        self._begin = self._first.again()
        tensors = self._new_tensors(self._begin)
        self._left = {f"(left {at})": tensor for at, tensor in enumerate(tensors.values())}
        substitutes = {name: like(tensor) for name, tensor in self._left.items()}
        self._begin.restore(others={id(self._left[name]): tensor for name, tensor in substitutes.items()})
        try:
            again = export(substitutes)
        except NotRepeatedError:
            raise
        except Exception as error:
            raise carried from error
        results = self._results(again)
        if any(results.get(root) != number for root, number in self._results(joint).items()):
            raise carried

    def _results(self, joint: JointGraph) -> dict[str, int]:
        result = self._numbered(joint.module.graph, joint.module, joint.inputs)
        return {root: result[node][0] for root, node in joint.outputs.items()}

    def _numbered(
        self, graph: torch.fx.Graph, owner: Any, inputs: Mapping[torch.fx.Node, str]
    ) -> dict[torch.fx.Node, tuple[int, bool]]:
        """Step 2: node -> (its number, whether it depends on constants alone)."""
        result: dict[torch.fx.Node, tuple[int, bool]] = {}
        drawn = 0
        for node in graph.nodes:
            if node.op == "placeholder":
                name = inputs.get(node, node.name)
                number = self._numbers.get(id(self._left.get(name.removeprefix("buffer/"))))
                result[node] = self._number(("input", name)) if number is None else number, False
            elif node.op == "get_attr":
                value = owner
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                result[node] = self._number(("constant", constant_key(value))), True
            elif node.op == "call_function":
                draw = draws(node)
                drawn += draw
                given = map_arg((node.args, node.kwargs), lambda used: f"value {result[used][0]}")
                number = self._number((str(node.target), repr(given), drawn if draw else 0))
                result[node] = number, not draw and all(result[source][1] for source in node.all_input_nodes)
        return result

    def _number(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))


def _generators() -> dict[str, Any]:
    result: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    return result if numpy is None else {**result, "numpy.random": numpy.random.get_state()}

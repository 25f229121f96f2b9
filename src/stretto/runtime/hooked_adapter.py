"""Hooks on parameters that a Runner cannot call: of a parameter of which it trains a part as another tensor.

Hooks on what it trains itself act (`stretto.runtime.accumulate`). Uses two private names of `torch.Tensor`,
`_backward_hooks` and `_post_accumulate_grad_hooks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from stretto.errors import UsageError
from stretto.ir.parameters import Parameter


class Hooked:
    """Looks at the user's model before every step, as long as the user keeps it."""

    def __init__(
        self,
        parameters: tuple[Parameter, ...],
        given: Mapping[str, nn.Parameter],
        held: Mapping[int, nn.Parameter],
    ) -> None:
        """given: the model's parameters by name. held: index in `parameters` -> what this rank trains.

        Those that other ranks hold in parts are looked at, too, so that all ranks refuse. Raises UsageError.
        """
        self._apart: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        for k, parameter in enumerate(parameters):
            found = given.get(parameter.name)
            if found is None or not parameter.grads or held.get(k) is found:
                continue
            if parameter.shards or k in held or found.is_meta:
                self._apart.append((parameter.name, weakref.ref(found)))
        self.check()

    def check(self) -> None:
        """Raises UsageError for a hook on a parameter of the model that no rank trains as that tensor."""
        for name, whole in self._apart:
            parameter = whole()
            if parameter is not None and has_hooks(parameter):
                raise UsageError(
                    f"parameter {name!r} of the model has a hook (register_hook or "
                    "register_post_accumulate_grad_hook), which would not run: ranks train their parts of it "
                    "as tensors of their own. Register it on the parameter in runner.named_parameters(), "
                    "where it is given the gradient of this rank's part; or leave the parameter's module out "
                    "of the tp_plan; or remove the hook"
                )


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook waits for the parameter's gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))

"""Which parameters train: what was frozen when the step was captured, and what is frozen now.

    frozen in the capture, trains now    refused: the plan has no op that makes its gradient
    trained in the capture, frozen now   its gradient is dropped (`Runner.step`)
    unknown to the capture, trains now   refused: it would never change

Frozen parameters of other ranks are looked at, too, as long as the user keeps the model: where all ranks
unfreeze the same, all refuse, and none waits for another. Nothing that the user drops is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from stretto.errors import UsageError
from stretto.ir.program import Job

AGAIN = "capture the step again, plan it and make a new Runner"


class Frozen:
    """Looks at `requires_grad` before every step."""

    def __init__(self, job: Job, given: Mapping[str, nn.Parameter], held: Mapping[int, nn.Parameter]) -> None:
        """given: the model's parameters by all their names. held: index in the job -> what this rank trains.

        Raises UsageError where something trains that the plan cannot train.
        """
        self._frozen: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        self._parts: list[tuple[weakref.ref[nn.Parameter], nn.Parameter]] = []
        self._trained: list[bool] = []
        if not job.trains:
            return
        known = {parameter.name for parameter in job.parameters}
        new = [name for name, parameter in given.items() if parameter.requires_grad and name not in known]
        if new:
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            raise UsageError(
                f"parameter {new[0]!r}{more} requires a gradient, and the model that was captured did not "
                f"have it: {AGAIN}, or freeze it (requires_grad_(False))"
            )
        for k, parameter in enumerate(job.parameters):
            found, part = given.get(parameter.name), held.get(k)
            if parameter.frozen:
                watched = {id(p): p for p in (found, part) if p is not None}
                self._frozen += [(parameter.name, weakref.ref(p)) for p in watched.values()]
            elif found is not None and part is not None and found is not part:
                self._parts.append((weakref.ref(found), part))
                self._trained.append(found.requires_grad)
        self.check()

    def check(self) -> None:
        """Raises UsageError for a parameter that was frozen in the capture and trains now. A part of a
        parameter follows the whole one in the user's model when that is frozen or trained again."""
        for name, frozen in self._frozen:
            parameter = frozen()
            if parameter is not None and parameter.requires_grad:
                raise UsageError(
                    f"parameter {name!r} was frozen when the step was captured, and requires a gradient now, "
                    f"which the plan does not make: {AGAIN}, or freeze it (requires_grad_(False))"
                )
        for at, (whole, part) in enumerate(self._parts):
            found = whole()
            if found is not None and found.requires_grad != self._trained[at]:
                self._trained[at] = found.requires_grad
                part.requires_grad_(found.requires_grad)

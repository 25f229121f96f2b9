"""Captures of one model under several settings: what settings do not change is traced once.

Tracing takes most of a capture, and is done once for all layouts of rows and experts. Passes lay out a trace
(`TRACED_BY`); stages, data-parallel copies, the schedule and what is computed again come after them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from stretto.batch.loss import Loss
from stretto.capturing.cuts import cuts_of
from stretto.capturing.explain import explained
from stretto.capturing.graph import Traced
from stretto.capturing.laid_out import laid_out
from stretto.capturing.meshes import on_meshes, place_on_meshes
from stretto.capturing.split import Placement, check_split, layer_names, place, split
from stretto.capturing.stages import cut
from stretto.capturing.substitutes import check_synchronised
from stretto.capturing.trace import trace
from stretto.config import ParallelSettings
from stretto.errors import UsageError
from stretto.ir.kept import kept_over
from stretto.ir.program import Job
from stretto.ir.stage_maps import stage_ranks_of, virtual_stages_of
from stretto.parallelize import ops
from stretto.parallelize.layout import RankLayout, layout_of
from stretto.passes import on_job
from stretto.passes.owners import with_owners

TRACED_BY = (
    *("tp", "sequence_parallel", "tp_plan", "cp", "cp_kind", "skip_passes"),
    *("ep", "ep_plan", "ep_buffer", "ep_overflow"),
    *("ampipe_degree", "ampipe_capacity", "pipe_experts", "pipe_experts_multi_data"),
)
"""The settings that a trace depends on, besides the number of microbatches of all copies."""

KEPT = 4
"""Traces that are kept, the ones used last. Assumed: one of 96 layers takes about 100 MB."""


EACH = (1, 2, 4)
"""Stages a rank among which planning chooses. Assumed: idle time falls as one over their number (Megatron-LM,
arXiv 2104.04473), messages and the time of planning grow with it."""


@dataclass(slots=True)
class Captures:
    """A model, its loss, and what has been traced of them. Arguments are those of `stretto.capture`; dtype:
    of the parameters in the computation, None for their own. like: a job of another batch, whose stages are
    found again."""

    model: nn.Module
    batch: Any
    loss: Loss
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    tp_plan: Mapping[str, Any] | None = None
    equal_layers: bool = True
    like: Job | None = None
    _traced: OrderedDict[str, Traced] = field(default_factory=OrderedDict, init=False)

    def job(self, parallel: ParallelSettings, stages: int | None = None, degree: int | None = None) -> Job:
        """The job of these settings. stages: those of `split`, or `pp` times
        `virtual_stages`; degree: chunks, where `ampipe_degree` is "auto". Raises as `stretto.capture`."""
        with explained(self.model), ops.of_job(parallel.axes):
            return self._job(parallel, stages, degree)

    def stages(self, parallel: ParallelSettings) -> tuple[int, ...]:
        """In how many stages the settings cut the model; several where they leave that to planning, the
        fewest first."""
        asked = parallel.stages_asked
        if asked is not None:
            return (asked,)
        if parallel.virtual_stages != "auto":
            return (parallel.pp * virtual_stages_of(parallel.schedule, parallel.virtual_stages),)
        if on_meshes(self.model, parallel, self.tp_plan) is not None:
            return (parallel.pp,)  # its meshes are the stages
        most = len(layer_names(self.model)) // parallel.pp
        return tuple(parallel.pp * each for each in EACH if each == 1 or each <= most)

    def _job(self, parallel: ParallelSettings, stages: int | None, degree: int | None) -> Job:
        count = stages if stages is not None else self.stages(parallel)[0]
        check_split(self.model, parallel.split)  # names are checked before what takes long
        check_synchronised(self.model, parallel.dp)
        meshes = on_meshes(self.model, parallel, self.tp_plan)
        if meshes is None:
            traced = self._trace(parallel, degree)
            placement = self._placement(traced, parallel, count)
        elif count != len(meshes.meshes):
            raise UsageError(
                f"the model is on {len(meshes.meshes)} meshes, which are its stages; stages={count} is not"
            )
        else:
            traced = self._traced_now(parallel, RankLayout(meshes.tensor_parallel(self.model)), meshes)
            placement = place_on_meshes(traced, meshes)
        job = cut(traced, placement, count, parallel.microbatches)
        job = replace(
            job,
            schedule=parallel.schedule,
            max_live=parallel.max_live,
            microbatch_group=parallel.microbatch_group,
            pp=parallel.pp,
            axes=parallel.axes,
            zero=parallel.zero,
            updates=parallel.updates,
            clip_norm=parallel.clip_norm,
            parameters=tuple(replace(p, kept=kept_over(p, parallel.kept_axes)) for p in job.parameters),
            overlap=parallel.overlap,
            recompute=parallel.recompute,
            split_ops=parallel.split_ops,
            chunks=degree or (1 if parallel.ampipe_degree == "auto" else parallel.ampipe_degree),
        )
        return on_job(with_owners(job, parallel.owners), parallel.skip_passes)

    def _placement(self, traced: Traced, parallel: ParallelSettings, count: int) -> Placement:
        if self.like is None:
            ranks = stage_ranks_of(parallel.schedule, parallel.pp, count)
            return split(traced, count, parallel.split, ranks)
        refusal = (
            f"the stages of {traced.job.name} cannot be those of its other shape: with this batch it reads "
            "its parameters in another order; make both shapes call the same modules"
        )
        return place(traced, count, cuts_of(traced, self.like, refusal))

    def _trace(self, parallel: ParallelSettings, degree: int | None) -> Traced:
        """All layouts are made of one trace of the plain model."""

        def made() -> Traced:
            layout = layout_of(self.model, parallel, self.tp_plan, degree)
            rows = parallel.microbatches * parallel.dp
            key = repr(("plain", layout.mixtures, parallel.skip_passes, rows))
            plain = self._kept(key, lambda: self._traced_now(parallel, layout.traced))
            return laid_out(plain, layout, self.model, parallel.skip_passes) if layout.by_passes else plain

        return self._kept(traced_by(parallel, degree), made)

    def _kept(self, key: str, make: Callable[[], Traced]) -> Traced:
        if key not in self._traced:
            self._traced[key] = make()
        self._traced.move_to_end(key)
        while len(self._traced) > KEPT:
            self._traced.popitem(last=False)
        return self._traced[key]

    def _traced_now(self, parallel: ParallelSettings, layout: RankLayout, meshes: Any = None) -> Traced:
        return trace(
            self.model,
            self.batch,
            self.loss,
            microbatches=parallel.microbatches * parallel.dp,
            param_dtype=self.dtype,
            device=self.device,
            layout=layout,
            equal_layers=self.equal_layers,
            skip_passes=parallel.skip_passes,
            meshes=meshes,
        )


def traced_by(parallel: ParallelSettings, degree: int | None = None) -> str:
    """Equal for settings of which one trace serves all."""
    given = [(name, getattr(parallel, name)) for name in TRACED_BY]
    return repr((given, parallel.microbatches * parallel.dp, degree))

"""What one rank has of a model: the parameters and buffers that its stages use, and what ops read of them; of
a parameter that is sharded or kept in parts its part of the full tensor, and the full tensor from all parts.

a parameter that is replicated    the model's own tensor
one of which it has a part        a copy of this rank's part, one for each tie
one on a mesh of ranks            this rank's part, which shares the model's memory
one on "meta", if it may be       memory for this rank's part, without values yet
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stretto.errors import UsageError
from stretto.ir.axes import PIPELINE, TENSOR
from stretto.ir.kept import kept_spec, largest_part, part_number, rows_kept, rows_shape, shard_spec
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Plan
from stretto.ir.program import Buffer, Job, Parameter, TensorSpec
from stretto.parallelize.parts import full_of, local_part
from stretto.runtime.fit import check_shares, check_tensor, check_ties, pipeline_ranks
from stretto.tensor.errors import mesh_name, tensor_name
from stretto.tensor.face import local


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a tensor: a box, or several. Of packed query, key and value columns a rank has a
    piece of each.

    full_shape: the tensor's shape. boxes: (offsets in the full tensor, view of what the rank has there).
    """

    full_shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]

    @staticmethod
    def all_of(tensor: torch.Tensor) -> Part:
        """A tensor that the rank has in full."""
        return Part(tuple(tensor.shape), (((0,) * tensor.dim(), tensor),))


def full_spec(job: Job, parameter: Parameter) -> TensorSpec:
    """The spec of the model's own tensor, of which a rank has `parameter.spec`."""
    shape = list(parameter.spec.shape)
    for shard in parameter.shards:
        shape[shard.dim] *= shard.parts(job.size(shard.axis))
    return TensorSpec(tuple(shape), parameter.spec.dtype)


def part_of(
    full: torch.Tensor, parameter: Parameter, job: Job, coordinates: Mapping[str, int]
) -> torch.Tensor:
    """The part of the rank at `coordinates`; a view where it can be."""
    for shard in parameter.shards:
        full = local_part(full, shard, job.size(shard.axis), coordinates[shard.axis])
    if not parameter.kept:
        return full
    number = part_number(job, parameter, coordinates)
    first, end = rows_kept(job, parameter, number)
    rows = full.reshape(rows_shape(job, parameter))
    return rows[first:end].reshape(kept_spec(job, parameter, number).shape)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def pieces_of(
    part: torch.Tensor, parameter: Parameter, job: Job, coordinates: Mapping[str, int]
) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Where the part of the rank at `coordinates` lies: (offsets in the full tensor, view) of each box.

    One box, or one for each packed block of which it has rows; none where others keep all rows. What has the
    part's shape (a gradient, an optimizer's average) lies there too.
    """
    shape = parameter.spec.shape
    number = part_number(job, parameter, coordinates)
    first, end = rows_kept(job, parameter, number)
    if number != largest_part(parameter) and first == end:
        return []
    result = [((0,) * len(shape), part)] if not parameter.kept else [*_boxes(part, first, end, shape)]
    for shard in parameter.shards:
        parts, at = shard.parts(job.size(shard.axis)), shard.part(coordinates[shard.axis])
        dim, rows = shard.dim, shape[shard.dim] // shard.blocks
        boxes: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for offsets, kept in result:
            for block in range(shard.blocks):
                begin = max(offsets[dim], block * rows)
                length = min(offsets[dim] + kept.shape[dim], (block + 1) * rows) - begin
                if length > 0 or not rows:
                    place = begin + (block * (parts - 1) + at) * rows
                    piece = kept.narrow(dim, begin - offsets[dim], length)
                    boxes.append(((*offsets[:dim], place, *offsets[dim + 1 :]), piece))
        result = boxes
    return result


def _boxes(
    part: torch.Tensor, first: int, end: int, shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Where rows from `first` to `end` of a tensor, whose leading dims may be merged, lie in it."""
    if len(shape) <= part.dim():
        yield (first, *(0,) * (len(shape) - 1)) if shape else (), part
        return
    each = max(1, math.prod(shape[1 : len(shape) - part.dim() + 1]))  # rows of one of dim 0
    for at in range(first // each, -(-end // each)):
        begin, stop = max(first, at * each), min(end, (at + 1) * each)
        rows = part.narrow(0, begin - first, stop - begin)
        for offsets, box in _boxes(rows, begin - at * each, stop - at * each, shape[1:]):
            yield (at, *offsets), box.unsqueeze(0)


def join(parts: Sequence[torch.Tensor], parameter: Parameter, job: Job, copy: int = 0) -> torch.Tensor:
    """The full tensor from the parts of all ranks along the axes over which it has parts, in the order of
    ranks. copy: which of those that have the same is taken. One that has no parts is the first."""
    kept = list(parts)
    if parameter.kept:
        over = [axis for axis in job.axes if axis[0] in parameter.kept or parameter.is_sharded(axis[0])]
        groups: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        for at, part in enumerate(kept):
            here = Mesh(tuple(over)).coordinates(at)
            others = tuple(place for axis, place in here.items() if axis not in parameter.kept)
            groups.setdefault(others, {})[part_number(job, parameter, here)] = _rows(part)
        rows = (torch.cat([group[number] for number in sorted(group)]) for group in groups.values())
        kept = [one.reshape(parameter.spec.shape) for one in rows]
    # The last of a job's axes is the fastest.
    for axis, size in reversed(job.axes):
        for shard in parameter.shards:
            if shard.axis == axis:
                first = copy % shard.copies
                kept = [full_of(kept[at + first : at + size], shard) for at in range(0, len(kept), size)]
    return kept[0]


def part_here(name: str, tensor: torch.Tensor, spec: TensorSpec, rank: int, at: int) -> torch.Tensor:
    """What this rank has of a model's parameter or buffer: itself, or of one on a mesh its part, without a
    copy.

    spec: of the part that the plan has. at: the rank's number among those that share the stage. Raises
    UsageError where the tensor is on the mesh of other ranks, or is placed otherwise than at the capture.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    part = local(tensor.detach())
    mesh = mesh_name(tensor.device_mesh)
    if part is None:
        raise UsageError(
            f"the plan has {name!r} on rank {rank}, but it is on mesh {mesh}, "
            "which does not have the rank: capture this model again"
        )
    if tuple(part.shape) != spec.shape or tensor.device_mesh.get_coordinate() != (at,):
        raise UsageError(
            f"the plan has {name!r} as parts of shape {list(spec.shape)}, and part {at} on rank {rank}, but "
            f"it is {tensor_name(tensor)}: capture this model again"
        )
    return part


class RankTensors:
    """parameters, buffers: by index in the job. compute: of the parameters, what programs read: the same
    tensors, of those that are kept in parts with padding (`padded`, by `Parameter.kept_as`). full_tensors:
    tied name -> the full tensor of which a part was cut, until the Runner drops them. on_mesh: whether any of
    it is on a mesh. without_values: whether any of it has memory alone. cut_along: first name of a tie -> the
    dims along which this rank has a part. optimizers: those that have stepped over the parameters.
    """

    def __init__(
        self, plan: Plan, rank: int, model: nn.Module, shares: RankTensors | None, empty: bool = False
    ) -> None:
        """shares: what another Runner on this rank has, whose parts are used. empty: parameters may be on
        "meta".

        Raises UsageError where the model does not fit the plan."""
        self.plan, self.rank = plan, rank
        self.coordinates = plan.mesh.coordinates(rank)
        self.within_stage = {axis: at for axis, at in self.coordinates.items() if axis != PIPELINE}
        self.parameters: dict[int, nn.Parameter] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.full_tensors: dict[str, torch.Tensor] = {}
        self.cut_along: dict[str, tuple[int, ...]] = {}
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.on_mesh = False
        if shares is not None:
            check_shares(plan, shares.plan)
        self._shared = {
            known.tied_to: kept for known, kept in (() if shares is None else shares.known_parameters())
        }
        self.padded: dict[str, torch.Tensor] = {} if shares is None else shares.padded
        self._parts: dict[int, nn.Parameter] = {}
        self._empty, self.without_values = empty, False
        self._adopt(model, shares)
        self.device = next(
            (t.device for t in (*self.parameters.values(), *self.buffers.values())), torch.device("cpu")
        )
        known = self.plan.job.parameters
        self.compute = {
            k: self.padded.get(known[k].kept_as, one.detach()) for k, one in self.parameters.items()
        }
        self._addresses = {k: parameter.data_ptr() for k, parameter in self.parameters.items()}
        self.owned = self._find_owned()

    def _adopt(self, model: nn.Module, shares: RankTensors | None) -> None:
        stages = set(self.plan.schedule.stages_of(self.coordinates[PIPELINE]))
        given = dict(model.named_parameters(remove_duplicate=False))
        kept = dict(model.named_buffers(remove_duplicate=False))
        for k, parameter in enumerate(self.plan.job.parameters):
            if stages & set(parameter.stages):
                result = given.get(parameter.name)
                full = full_spec(self.plan.job, parameter)
                check_tensor(self.rank, parameter.name, result, full, self.plan.job.param_dtype, self._empty)
                assert isinstance(result, nn.Parameter)
                self.parameters[k] = self._part(parameter, result)
                if cut := self._cut(parameter, self.parameters[k], result):
                    self.cut_along[parameter.tied_to] = cut
        check_ties(self.plan.job, given)
        for k, buffer in self._buffers_here():
            self.buffers[k] = self._buffer(buffer, kept.get(buffer.name))
            if shares is not None and buffer.name in self.of_first_copy(shares.plan):
                self.buffers[k] = self.buffers[k].clone()

    def _buffers_here(self) -> Iterator[tuple[int, Buffer]]:
        stages = set(self.plan.schedule.stages_of(self.coordinates[PIPELINE]))
        for k, buffer in enumerate(self.plan.job.buffers):
            if stages & ({*buffer.stages} | {s for s, _, _ in buffer.updates}):
                yield k, buffer

    def _buffer(self, buffer: Buffer, found: torch.Tensor | None) -> torch.Tensor:
        check_tensor(self.rank, buffer.name, found, buffer.spec, None)
        assert found is not None
        return part_here(buffer.name, found, buffer.spec, self.rank, self._rank_in_stage())

    def for_plan(self, plan: Plan, model: nn.Module | None) -> RankTensors:
        """The same tensors for another plan of the layout (`stretto.runtime.shapes`). model: has buffers that
        the other plan reads on this rank alone; None where it was dropped. Raises UsageError where they are
        missing."""
        other = copy.copy(self)
        other.plan = plan
        given = {} if model is None else dict(model.named_buffers(remove_duplicate=False))
        given |= dict(self.named_buffers())
        other.buffers = {
            k: other._buffer(buffer, given.get(buffer.name)) for k, buffer in other._buffers_here()
        }
        return other

    def _cut(self, parameter: Parameter, part: torch.Tensor, full: torch.Tensor) -> tuple[int, ...]:
        """Along which dims ranks have parts of a parameter."""
        if parameter.slot is not None:  # some have all rows, others none
            return tuple(d for d, n in enumerate(full.shape) if parameter.spec.shape[d] != n)
        rows = {0} if parameter.kept else set()  # also where the first part has all of them
        sizes = full.shape[full.dim() - part.dim() :]  # leading dims may be merged
        return tuple(d for d, n in enumerate(sizes) if d in rows or part.shape[d] != n)

    def of_first_copy(self, trained: Plan) -> frozenset[str]:
        """The buffers of which this plan, an evaluation's, reads those of the first data-parallel copy: each
        copy that trains writes its own."""
        if trained.job.copies == 1 or self.plan.job.trains:
            return frozenset()
        return frozenset(buffer.name for buffer in trained.job.buffers if buffer.updates)

    def _part(self, parameter: Parameter, full: nn.Parameter) -> nn.Parameter:
        """What this rank has of a parameter: the model's own tensor, or a copy of its part (one a tie). Of
        a model on several meshes, its part, which shares the model's memory."""
        here = part_here(parameter.name, full, parameter.spec, self.rank, self._rank_in_stage())
        on_mesh = here is not full
        self.on_mesh |= on_mesh
        in_parts = bool(parameter.shards or parameter.kept)
        if not in_parts and not on_mesh and not full.is_meta:
            return full
        if parameter.tied_to in self._shared:
            return self._shared[parameter.tied_to]
        if id(full) not in self._parts:
            if full.is_meta:
                here = self._empty_part(parameter, full.dtype, torch.device(self.plan.job.device))
                self.without_values = True
            elif in_parts and not on_mesh:
                self.full_tensors[parameter.tied_to] = full.detach()
                values = part_of(full.detach(), parameter, self.plan.job, self.coordinates)
                here = values.clone()
                if parameter.kept:
                    here = self._empty_part(parameter, full.dtype, full.device).copy_(values)
            self._parts[id(full)] = nn.Parameter(here, requires_grad=full.requires_grad)
        return self._parts[id(full)]

    def _empty_part(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for this rank's part; where it keeps rows, with the padding of collectives."""
        job = self.plan.job
        if not parameter.kept:
            return torch.empty(parameter.spec.shape, dtype=dtype, device=device)
        if parameter.kept_as not in self.padded:
            padded = torch.zeros(shard_spec(job, parameter).shape, dtype=dtype, device=device)
            self.padded[parameter.kept_as] = padded
        return self.rows_here(parameter, self.padded[parameter.kept_as])

    def rows_here(self, parameter: Parameter, padded: torch.Tensor) -> torch.Tensor:
        """Of what programs have of a parameter that is kept in rows, or of its gradient, this rank's."""
        job = self.plan.job
        shape = kept_spec(job, parameter, part_number(job, parameter, self.coordinates)).shape
        if parameter.slot is not None:
            return padded.view(-1).narrow(0, parameter.slot.first, math.prod(shape)).view(shape)
        return padded.narrow(0, 0, shape[0]) if shape else padded.view(())

    def _rank_in_stage(self) -> int:
        """This rank's number among the ranks of its stage: on a mesh of their own, its coordinate there."""
        return self.coordinates.get(TENSOR, 0)

    def known_parameters(self) -> Iterator[tuple[Parameter, nn.Parameter]]:
        """This rank's parameters with what the plan knows of them: each once, by the first of its names, in
        the model's order."""
        known = self.plan.job.parameters
        kept = {known[k].tied_to: parameter for k, parameter in self.parameters.items()}
        for parameter in known:
            if parameter.name in kept:
                yield parameter, kept[parameter.name]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """`Runner.named_parameters`."""
        for known, parameter in self.known_parameters():
            yield known.name, parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's buffers with their names in the model."""
        for k, buffer in sorted(self.buffers.items()):
            yield self.plan.job.buffers[k].name, buffer

    def state_bytes(self) -> int:
        """What optimizers keep for the parameters now."""
        mine = {id(parameter) for parameter in self.parameters.values()}
        states = [s for o in self.optimizers for p, s in o.state.items() if id(p) in mine]
        return sum(t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor))

    def check_bound(self) -> None:
        """Ops read the tensors that the parameters had when the runner was made."""
        for k, parameter in self.parameters.items():
            if parameter.data_ptr() != self._addresses[k]:
                raise UsageError(
                    f"parameter {self.plan.job.parameters[k].name!r} has got another tensor since the Runner "
                    "was made (load_state_dict(assign=True)?): copy values into it instead, or "
                    "make a new Runner"
                )

    def parts(self) -> dict[str, Part]:
        """Views of all that this rank has: `model.<name>`, a parameter under the first name of its tie;
        `buffer.<name>`. Raises UsageError for a model on meshes."""
        self.refuse_on_mesh()
        result = {
            f"model.{known.name}": self.part(known, kept.detach()) for known, kept in self.known_parameters()
        }
        return result | {f"buffer.{name}": Part.all_of(buffer) for name, buffer in self.named_buffers()}

    def refuse_on_mesh(self) -> None:
        """Raises UsageError for a model on meshes: where its parts lie is not known here."""
        if self.on_mesh:
            raise UsageError(
                "the Runner's model is on meshes (stretto.shard), whose tensors the Runner shares: take, "
                "save and load the model's own, with torch.distributed.checkpoint, which knows DTensors"
            )

    def part(self, parameter: Parameter, kept: torch.Tensor) -> Part:
        """Where what has the shape of this rank's part of the parameter is in the full tensor."""
        job = self.plan.job
        boxes = pieces_of(kept, parameter, job, self.coordinates)
        return Part(full_spec(job, parameter).shape, tuple(boxes))

    def owned_parts(self) -> dict[str, Part]:
        """Of `parts`, what this rank is the one to save, or one of those that have the same."""
        kept = {f"model.{name}" for name, _ in self.named_parameters() if name in self.owned}
        # Of those that write a buffer, or read it, the first.
        for buffer in () if any(self.within_stage.values()) else self.plan.job.buffers:
            writers = {stage for stage, _, _ in buffer.updates} or set(buffer.stages)
            if writers and min(map(self.plan.rank_of, writers)) == self.coordinates[PIPELINE]:
                kept.add(f"buffer.{buffer.name}")
        return {key: part for key, part in self.parts().items() if key in kept}

    def _find_owned(self) -> frozenset[str]:
        """What `Runner.owns`."""
        first = {tie: min(ranks, default=-1) for tie, ranks in pipeline_ranks(self.plan).items()}
        owned = set()
        for parameter in self.plan.job.parameters:
            copies = dict.fromkeys(parameter.kept, 1) | {s.axis: s.copies for s in parameter.shards}
            copy = any(at % copies.get(axis, at + 1) for axis, at in self.within_stage.items())
            if first.get(parameter.tied_to) == self.coordinates[PIPELINE] and not copy:
                owned.add(parameter.name)
        return frozenset(owned)

"""Do what a plan says on arrays in this process, and check it against what a plan must be. For tests.

Written without the planner's rooms, from the types alone: what a rank sends it must keep, what it receives it
must lack, and each element arrives once. The links are counted again, from the transfers' own times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stretto.tensor.layout import Layout, Region
from stretto.tensor.reshard.plan import ReshardPlan
from stretto.tensor.reshard.tasks import Hosts, Tensor


def replayed(plan: ReshardPlan, tensors: Sequence[Tensor]) -> list[list[dict[int, np.ndarray]]]:
    """The target array of each rank, for each tensor and target; asserts all that a plan must keep.

    Of a tensor with several targets a box that a rank receives goes into each of them that the rank is on.
    """
    full_values = [np.arange(math.prod(t.shape), dtype=np.int64).reshape(t.shape) + 7 for t in tensors]
    got = [
        [_local(layout, unsharded, blank=True) for layout in t.targets]
        for t, unsharded in zip(tensors, full_values)
    ]
    times = [
        [{rank: np.zeros(array.shape, np.int64) for rank, array in arrays.items()} for arrays in each]
        for each in got
    ]
    # what lies there as terms of a sum is no value: sending it would show
    kept = [
        _local(t.source, unsharded, blank=bool(t.source.partial_axes))
        for t, unsharded in zip(tensors, full_values)
    ]
    boxes = [[layout.regions(t.shape) for layout in t.targets] for t in tensors]

    def places(tensor: int, rank: int, region: Region) -> list[tuple[int, tuple[slice, ...]]]:
        """In which targets a rank needs a region, and where it is in its part."""
        found = []
        for target, box in enumerate(boxes[tensor]):
            if rank in box and _shares(box[rank], region):
                found.append((target, _inside(region, box[rank])))
        assert found, "came to a rank that does not need it"
        return found

    def arrive(tensor: int, rank: int, region: Region, values: np.ndarray) -> None:
        for target, inner in places(tensor, rank, region):
            got[tensor][target][rank][inner] = values
            times[tensor][target][rank][inner] += 1

    for copy in plan.copies:
        source = tensors[copy.tensor].source
        mine = kept[copy.tensor][copy.rank]
        inner = _inside(copy.region, source.regions(tensors[copy.tensor].shape)[copy.rank])
        arrive(copy.tensor, copy.rank, copy.region, mine[inner])
    for one in plan.transfers:
        tensor = tensors[one.tensor]
        assert one.sender not in one.receivers
        assert len(set(one.receivers)) == len(one.receivers) > 0
        count = math.prod(stop - start for start, stop in one.region)
        assert one.nbytes == count * tensor.itemsize_bytes > 0
        box = tensor.source.regions(tensor.shape)[one.sender]
        values = kept[one.tensor][one.sender][_inside(one.region, box)]
        for rank in one.receivers:
            if rank in tensor.source.ranks and not tensor.source.partial_axes:
                assert not _shares(tensor.source.regions(tensor.shape)[rank], one.region), "has it already"
            arrive(one.tensor, rank, one.region, values.copy())
    for tensor_index, each in enumerate(got):
        zeros = tensors[tensor_index].targets[0].zero_ranks()
        for arrays, counts in zip(each, times[tensor_index]):
            for rank, array in arrays.items():
                if rank in zeros:
                    assert (counts[rank] == 0).all()
                    array[...] = 0
                else:
                    assert (counts[rank] == 1).all(), "an element came twice, or not at all"
    return got


def check_values(plan: ReshardPlan, tensors: Sequence[Tensor]) -> None:
    """Every rank has, after the plan, exactly what its target layout says."""
    for tensor, each in zip(tensors, replayed(plan, tensors)):
        unsharded = np.arange(math.prod(tensor.shape), dtype=np.int64).reshape(tensor.shape) + 7
        for target, arrays in zip(tensor.targets, each):
            for rank, region in target.regions(tensor.shape).items():
                wanted = unsharded[tuple(slice(*ends) for ends in region)]
                zero = rank in tensor.targets[0].zero_ranks()
                np.testing.assert_array_equal(arrays[rank], 0 * wanted if zero else wanted)


def check_times(plan: ReshardPlan, hosts: Hosts) -> None:
    """No direction of a host's link carries two things at once, and the plan's figures are those of its
    transfers."""
    per_us = hosts.link_bytes_per_s / 1e6
    uses: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    last_us = 0.0
    for one in plan.transfers:
        piece_us = min(one.nbytes, plan.piece_bytes) / per_us
        start_us = one.start_us
        for here, there in zip((one.sender, *one.receivers), one.receivers):
            if hosts[here] == hosts[there]:
                continue
            ends = (start_us, start_us + one.nbytes / per_us)
            uses["up", hosts[here]].append(ends)
            uses["down", hosts[there]].append(ends)
            sent[hosts[here]] += one.nbytes
            received[hosts[there]] += one.nbytes
            assert one.end_us >= (ends[1] + hosts.latency_us) * (1 - 1e-9)
            start_us += piece_us + hosts.latency_us
        last_us = max(last_us, one.end_us)
    for spans in uses.values():
        spans.sort()
        for before, after in pairwise(spans):
            assert before[1] <= after[0] * (1 + 1e-9) + 1e-9
    assert plan.makespan_us == last_us
    assert plan.sent_bytes == sent
    assert plan.received_bytes == received
    assert plan.link_bytes == sum(sent.values())
    assert (
        plan.bytes_sent == plan.needed_bytes == sum(one.nbytes * len(one.receivers) for one in plan.transfers)
    )
    assert plan.makespan_us >= plan.bound_us * (1 - 1e-9)


def _local(layout: Layout, unsharded: np.ndarray, blank: bool = False) -> dict[int, np.ndarray]:
    """What each rank has of a full array; blank: as many elements of no meaning."""
    kept = {}
    for rank, region in layout.regions(unsharded.shape).items():
        box = unsharded[tuple(slice(*ends) for ends in region)]
        kept[rank] = np.full(box.shape, -1, np.int64) if blank else box.copy()
    return kept


def _inside(region: Region, box: Region) -> tuple[slice, ...]:
    """Where a region is within a rank's box."""
    for (start, stop), (low, high) in zip(region, box):
        assert low <= start <= stop <= high, f"{region} is not within {box}"
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(region, box))


def _shares(a: Region, b: Region) -> bool:
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b))

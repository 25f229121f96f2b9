"""The short notation of layouts: one letter for each dim of the tensor."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard

from stretto.errors import UsageError
from stretto.tensor.layout import Layout
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.notation import between_meshes, read

R = Replicate()


def test_a_letter_is_for_a_dim_and_a_digit_for_an_axis():
    assert read("2x4:S0RR").placements == (Shard(0), R)
    assert read("2x4:RS1S0").placements == (Shard(2), Shard(1))
    assert read("2x4:RS01").placements == (Shard(1), Shard(1))
    assert read("2x4:RRR").dims == 3
    assert read("1x1:").dims == 0


def test_the_target_stands_on_the_hosts_after_the_source():
    source, target, hosts = between_meshes("2x2:S0R", "1x3:RS1", Hosts((), 5.0, 7.0))
    assert source == Layout(((0, 1), (2, 3)), (Shard(0), R))
    assert target == Layout(((4, 5, 6),), (R, Shard(1)))
    assert hosts == Hosts((0, 0, 1, 1, 2, 2, 2), 5.0, 7.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("S0RR", "HOSTSxDEVICES:LETTERS"),
        ("2x4:S2RR", "HOSTSxDEVICES:LETTERS"),
        ("2x4:SRR", "such as 2x4:S0RR"),
        ("0x4:S0", "at least one host"),
        ("2x4:S0S0", "axis 0 cuts twice"),
        ("2x4:S00", "axis 0 cuts twice"),
        ("2x4:S10", "write S01"),
    ],
)
def test_what_is_not_in_the_notation_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        read(text)

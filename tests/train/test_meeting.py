"""What is said where ranks do not meet: the interface that Gloo cannot use, or else where they meet."""

from __future__ import annotations

import pytest
from torch.distributed import ProcessGroupGloo

from stretto.train.world import what_to_check


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError) as told:
        ProcessGroupGloo.create_device(interface="none0")
    assert what_to_check(told.value, 2).startswith("GLOO_SOCKET_IFNAME = 'none0': give a network interface")
    other = RuntimeError("The client socket has timed out after 300000ms")
    assert "all 2 ranks were started with the same MASTER_ADDR" in what_to_check(other, 2)

"""What the lab's tests share: a machine that can run it, or a skip with the reason; and nothing left over."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from stretto.errors import StrettoError
from stretto.lab import Lab, network, quota
from stretto.lab.network import LabOwner


@pytest.fixture(scope="session")
def _able() -> str | None:
    if lacking := network.missing():
        return "; ".join(lacking)
    try:
        with Lab(hosts=1, rate="100mbit"):
            return None
    except StrettoError as error:
        return str(error)


def leftovers() -> list[str]:
    """Names of labs that no one will remove: of dead owners, or of this process."""
    groups = [group.name for group in quota.lab_groups(quota.find_controller())]
    owners = [(name, LabOwner.parse(name)) for name in [*network.namespaces(), *groups]]
    return [name for name, owner in owners if owner and (owner.pid == os.getpid() or not owner.alive)]


@pytest.fixture
def machine(_able: str | None) -> Iterator[None]:
    """This machine can run the lab; after the test nothing of it is left."""
    if _able is not None:
        pytest.skip(f"no lab here: {_able}")
    before = network.namespaces()
    yield
    assert leftovers() == []
    assert {name for name in network.namespaces() if LabOwner.parse(name) is None} == {
        name for name in before if LabOwner.parse(name) is None
    }


@pytest.fixture
def quotas(machine: None) -> quota.CpuController:
    """The controller of processor quotas."""
    controller = quota.find_controller()
    if controller is None:
        pytest.skip(quota.NO_QUOTA)
    return controller

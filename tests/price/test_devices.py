"""The catalogue: every figure has a source, and what is not known of a device says so."""

from __future__ import annotations

import pytest

from stretto.price.devices import device, devices


@pytest.mark.parametrize("key", devices())
def test_every_figure_has_a_status_and_a_source(key: str) -> None:
    for name, figure in device(key).figures.items():
        assert figure.status in ("read", "measured", "fitted", "inferred", "recalled", "assumed"), name
        assert len(figure.source) > 2, name


@pytest.mark.parametrize("key", devices())
def test_what_models_need_is_there_and_credible(key: str) -> None:
    found = device(key)
    roof, fabric = found.roof(), found.fabric()
    assert 1e8 < roof.flops_per_us < 1e10  # 100 TFLOP/s to 10 PFLOP/s
    assert 0 < roof.efficiency.matmul <= 1
    assert 0 < roof.efficiency.memory <= 1
    assert fabric.nic_bytes_per_us < fabric.device_bytes_per_us
    assert fabric.peer_bytes_per_us <= fabric.device_bytes_per_us
    assert found.memory_bytes >= 32e9


def test_figures_are_those_of_the_sheets() -> None:
    h100 = device("h100")
    assert h100.roof().flops_per_us == 989e6
    assert h100.roof().memory_bytes_per_us == 3.35e6
    assert h100.fabric().device_bytes_per_us == 450e3
    assert h100.fabric().nic_bytes_per_us == 50e3
    assert device("gb200").node_devices == 72
    assert device("mi300x").fabric().topology == "mesh"


def test_what_was_fitted_on_one_device_is_assumed_of_others() -> None:
    assert device("a100-80gb").figures["launch_us"].status == "fitted"
    assumed = device("b200").figures["launch_us"]
    assert assumed.status == "assumed"
    assert "a100-80gb" in assumed.source
    assert device("b200").figures["nic_gbit"].status == "recalled"


def test_a_measured_ring_stays_with_its_device() -> None:
    fabric = device("v100").fabric()
    assert fabric.bus_bytes_per_us(2) == 22_500
    assert fabric.bus_bytes_per_us(8) == 134_000
    assert device("h100").fabric().ring_bytes_per_us == ()

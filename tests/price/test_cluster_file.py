"""Clusters by name and by file: round trips, calibration, prices, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import UsageError
from stretto.price.cluster_file import find_cluster, load_cluster, named_cluster, save_cluster
from stretto.price.collectives import Group, collective_curve
from tests.price.test_nccl_tests import NEW

FULL = """
device = "a100-80gb"
count = 12
node_devices = 4

[figures]
nic_gbit = 100
matmul = 0.7

[measured]
nccl_tests = ["sweep.txt"]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ours.toml"
    path.write_text(text)
    return path


def test_a_file_changes_the_catalogue_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text(NEW)
    found = load_cluster(write(tmp_path, FULL))
    assert (found.nodes, found.fabric.node_devices) == (3, 4)
    assert found.fabric.nic_bytes_per_us == 12_500
    assert found.roof.efficiency.matmul == 0.7
    assert found.device.figures["matmul"].source == "cluster file ours"
    assert found.roof.flops_per_us == 312e6
    cost = found.collective("all_reduce", {"dp": 3, "tp": 4}, "tp")
    assert cost.curve.us(1048576) == 40.0
    assert cost.source.startswith("measured by nccl-tests")
    assert found.collective("all_reduce", {"dp": 3, "tp": 4}, "dp").source.startswith("model of ours")


def test_a_saved_cluster_is_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text(NEW)
    found = load_cluster(write(tmp_path, FULL))
    save_cluster(found, tmp_path / "again.toml")
    again = find_cluster(str(tmp_path / "again.toml"))
    assert (again.text, again.roof, again.fabric) == (found.text, found.roof, found.fabric)
    assert again.measured == found.measured
    save_cluster(named_cluster("h100x64"), tmp_path / "plain.toml")
    assert (tmp_path / "plain.toml").read_text() == 'device = "h100"\ncount = 64\n'


def test_prices_follow_from_the_mesh() -> None:
    found = named_cluster("h100x64")
    mesh = {"pp": 2, "dp": 4, "tp": 8}
    tp, dp = (found.collective("all_reduce", mesh, axis) for axis in ("tp", "dp"))
    assert tp.curve == collective_curve("all_reduce", Group(8, 1), found.fabric)
    assert dp.curve.us(1e8) > 5 * tp.curve.us(1e8)
    assert "4 nodes" in dp.source
    assert 0 < dp.slowdown < 1
    with pytest.raises(UsageError, match="no axis 'ep'"):
        found.collective("all_gather", mesh, "ep")


def test_messages_between_nodes_are_slower() -> None:
    found = named_cluster("a100-80gbx16")
    near, far = found.link(0, 7), found.link(7, 8)
    assert near.bytes_per_us == pytest.approx(300e3 * 0.74)
    assert far.bytes_per_us == pytest.approx(25e3 * 0.63)
    assert near.latency_us < far.latency_us
    # Each message is a kernel, which starts when the one before it has ended; what then is on its way is not
    # in the next one's way.
    assert near.start_us == far.start_us == pytest.approx(4.9)
    assert far.latency_us == pytest.approx(12.5)
    mesh = {"pp": 4, "tp": 4}
    assert found.pp_link(mesh, 0, 1) == near
    assert found.pp_link(mesh, 1, 2) == far


def test_a_link_of_a_mesh_is_one_link() -> None:
    assert named_cluster("mi300xx8").link(0, 1).bytes_per_us == pytest.approx(64e3 * 0.7)


@pytest.mark.parametrize("figure", ["link_gbps = 100", "link_efficiency = 0.5"])
def test_links_of_ones_own_take_the_place_of_measured_rings(tmp_path: Path, figure: str) -> None:
    ours = load_cluster(write(tmp_path, f'device = "v100"\ncount = 8\n[figures]\n{figure}\n'))
    assert ours.fabric.ring_bytes_per_us == ()
    plain = named_cluster("v100x8")
    mesh = {"pp": 1, "tp": 8}
    told = [one.collective("all_reduce", mesh, "tp").curve.us(1e8) for one in (ours, plain)]
    assert told[0] != told[1], "a figure that is given counts"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ours.toml: count"),
        ("count = 0", "ours.toml: count = 0"),
        ("count = 8\nnode = 8", "ours.toml: .*node"),
        ("count = 8\n[figures]\nnic = 8", "ours.toml: .*nic"),
        ("count = 8\n[figures]\nmatmul = 1.5", "figures.matmul = 1.5"),
        ('count = 8\n[measured]\nnccl_tests = ["no.txt"]', "no.txt: cannot be read"),
        ("count =", "not TOML"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_cluster(write(tmp_path, 'device = "h100"\n' + text))


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ours.toml: unknown device 'h900': did you mean 'h"):
        load_cluster(write(tmp_path, 'device = "h900"\ncount = 8'))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100x0", "its count is '0', and must be an integer from 1 to"),
        ("h100x1.5", "its count is '1.5', and must be"),
        ("h100", "its count is '', and must be"),
        ("h100x", "its count is '', and must be"),
        ("h900x8", "no device is called 'h900'"),
        ("x8", "no device is called 'x8'"),
    ],
)
def test_what_a_name_lacks_is_said(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_cluster(name)

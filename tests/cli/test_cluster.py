"""`stretto cluster`: the tables name every device and every source."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.cluster import cluster
from stretto.errors import UsageError
from stretto.price.calibration import save_calibration
from stretto.price.cluster_file import load_cluster
from stretto.price.devices import devices
from tests.price.test_calibration import calibration


def run(*arguments: str) -> str:
    ran = CliRunner().invoke(cluster, list(arguments), catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_the_list_names_every_device_and_marks_what_is_not_read() -> None:
    printed = run("list")
    for key, found in devices().items():
        assert key in printed
        assert found.name in printed
    assert "400~" in printed  # recalled
    assert "989?" in printed  # assumed


def test_show_says_nodes_links_and_sources() -> None:
    printed = run("show", "h100x1024")
    assert "1024 x NVIDIA H100 SXM 80 GB, 128 nodes of 8" in printed
    for word in ("989 TFLOP/s", "400 Gbit/s", "recalled", "assumed", "ml-engineering"):
        assert word in printed


def test_show_saves_a_file_to_start_from(tmp_path: Path) -> None:
    run("show", "mi300xx16", "--save", str(tmp_path / "ours.toml"))
    assert load_cluster(tmp_path / "ours.toml").count == 16
    assert "2 nodes of 8" in run("show", str(tmp_path / "ours.toml"))


def test_a_calibration_is_shown_as_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save_calibration(calibration(), path)
    printed = run("show", str(path))
    assert "ops measured, 1 traced" in printed
    for word in ("all_reduce", "4 apart", "90 us", "12.0 MB/s", "20 / 25 us"):
        assert word in printed


def test_equal_devices_are_shown_by_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "flat.toml"
    path.write_text("peak_tflops = 5\nmemory_gbps = 100\nlink_gbps = 12.5\n")
    lines = run("show", str(path)).splitlines()
    assert "12.5" in next(line for line in lines if "link_gbps" in line)
    assert "by default" in next(line for line in lines if "latency_us" in line)
    with pytest.raises(UsageError, match="--save writes clusters of the catalogue's devices"):
        run("show", str(path), "--save", str(tmp_path / "other.toml"))


@pytest.mark.parametrize(
    ("name", "said"), [("h10x8", "unknown cluster 'h10x8'"), ("local", "`stretto calibrate`")]
)
def test_wrong_usage(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run("show", name)

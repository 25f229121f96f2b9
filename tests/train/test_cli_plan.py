"""`stretto plan`: from settings to a plan file, for this machine or a described one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clusters import cores_file
from tests.train.tiny import write_settings
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.errors import UsageError


def test_a_described_cluster_gives_the_same_file_each_time(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(cores_file(link_gbps=0.0125, latency_us=50.0))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        command = ["plan", str(config), "-o", str(file), "--cluster", str(cluster), "--set", "parallel.pp=2"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "predicted step" in result.output
        assert not (tmp_path / "cache").exists(), "a tokenizer that is not there yet is not needed"
    assert files[0].read_bytes() == files[1].read_bytes()
    plan = stretto.load_plan(files[0])
    stretto.verify(plan)
    assert plan.ranks == 2
    assert plan.costs.default_link.bytes_per_us == 12.5


def test_this_machine_is_measured(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(config), "-o", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "measured on this processor, 1 thread" in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["give a cluster file"]),
        ("latency_us = [", ["is not TOML"]),
        ("latencyus = 3\n", ["cluster.toml", "latencyus", "latency_us"]),
    ],
)
def test_a_wrong_cluster_is_refused_with_its_file(tmp_path: Path, text: str | None, words: list[str]) -> None:
    config, cluster = write_settings(tmp_path), tmp_path / "cluster.toml"
    if text is not None:
        cluster.write_text(text)
    error = CliRunner().invoke(app, ["plan", str(config), "--cluster", str(cluster)]).exception
    assert isinstance(error, UsageError)
    assert all(word in str(error) for word in words)

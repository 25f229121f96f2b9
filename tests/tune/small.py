"""A small model and a described cluster for tunings, whose plans take a moment."""

from __future__ import annotations

from pathlib import Path

from stretto.config import TrainSettings, load_settings
from tests.clusters import cores

TEXT = """# a small run
[model]
layers = {layers}
hidden = 64
heads = 4
context = 64
vocab_size = 512

[data]
sequence_length = 64
vocab_size = 512

[parallel]  # how it was run before
pp = 2
microbatches = 4  # of two rows
schedule = "1f1b"
overlap = "{overlap}"

[training]
global_batch = {batch}
"""

CLUSTER = cores(peak_tflops=0.2, memory_gbps=50.0, op_overhead_us=1.0, latency_us=5.0, link_gbps=2.0)


def write_settings(
    folder: Path, *, layers: int = 4, batch: int = 8, overlap: str = "local", more: str = ""
) -> Path:
    """A settings file in a folder."""
    path = folder / "small.toml"
    path.write_text(TEXT.format(layers=layers, batch=batch, overlap=overlap) + more, encoding="utf-8")
    return path


def write_cluster(folder: Path, memory_bytes: int | None = None) -> Path:
    """`CLUSTER` as a file."""
    path = folder / "cluster.toml"
    given = CLUSTER.model_dump(exclude_unset=True)
    if memory_bytes is not None:
        given["memory_bytes"] = memory_bytes
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in given.items()), encoding="utf-8")
    return path


def settings(
    folder: Path, *, layers: int = 4, batch: int = 8, overlap: str = "local", more: str = ""
) -> TrainSettings:
    """The settings of such a file."""
    return load_settings(write_settings(folder, layers=layers, batch=batch, overlap=overlap, more=more))

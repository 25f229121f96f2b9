"""What a plan's costs come from: this machine, measured, or a description of devices and links.

"local" means: measure here (`stretto.measure.measured`). A description is one of three: a `Cluster` of equal
devices and links, `Hardware` of the catalogue (by name such as `h100x64`, or a cluster file), or a
`Calibration` that was measured before. None of them touches a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.errors import UsageError
from stretto.files.parse import parse_toml
from stretto.files.settings_file import refusal
from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.program import Job
from stretto.measure.measured import measured_costs, memory_here
from stretto.price.calibration import Calibration, load_calibration
from stretto.price.cluster_file import Hardware, load_cluster, named_cluster
from stretto.price.hardware import hardware_costs
from stretto.price.priced import priced_costs
from stretto.price.roofline import described_costs


class Cluster(BaseModel):
    """Equal devices joined by equal links, for plans without the machine at hand.

    The defaults describe one core of a server processor (AVX-512, 2.6 GHz, measured) and, assumed, its local
    network; a plan's `costs.source` names the fields that were left at them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    flops_per_us: float = Field(default=80_000.0, gt=0)
    """Arithmetic that a device does in a microsecond; 80,000 is 80 GFLOP/s, one processor core."""
    memory_bytes_per_us: float = Field(default=10_000.0, gt=0)
    """Memory traffic of a device in a microsecond; 10,000 is 10 GB/s."""
    op_overhead_us: float = Field(default=3.0, ge=0)
    """What an op costs before it does anything: the dispatcher, a kernel's launch."""
    latency_us: float = Field(default=100.0, ge=0)
    """From the start of a send to the first byte at the receiver."""
    link_bytes_per_us: float = Field(default=1_000.0, gt=0)
    """Payload of a link in a microsecond; 1,000 is 8 Gbit/s, 12.5 is 100 Mbit/s."""
    processor_us_per_mb: float = Field(default=0.0, ge=0)
    """Processor time that each end of a message loses, for each 10**6 bytes."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory of a device; a plan that needs more is refused. None sets no limit."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise refusal("Cluster", list(Cluster.model_fields), error) from None


Description = Cluster | Hardware | Calibration
"""What can be planned for without the machine at hand."""


def costs_of(job: Job, schedule: Schedule, cluster: str | Description) -> Costs:
    """The costs of a job on a cluster.

    cluster: "local" to measure on this machine; a description; or the name or file of one, see
        `describe`.

    Raises UsageError for an unknown name, a file that cannot be read, a job that does not fit.
    """
    found = describe(cluster)
    if found is None:
        return measured_costs(job, schedule)
    if isinstance(found, Cluster):
        return described_costs(job, found)
    if isinstance(found, Hardware):
        return hardware_costs(job, schedule, found)
    return priced_costs(job, schedule, found)


def describe(cluster: str | Description) -> Description | None:
    """The description that a name or a file stands for; None for "local".

    A name is a device of the catalogue and a count, `h100x1024`. A file is a calibration (.json, made by
    `stretto calibrate`), a cluster file (.toml with the key `device`), or `stretto.Cluster`'s fields (.toml).

    Raises UsageError that says what was expected.
    """
    if cluster is None or isinstance(cluster, Description):
        return cluster
    if not isinstance(cluster, str):
        raise UsageError(
            f'a cluster is "local", a name such as h100x64, a file\'s path as text, or '
            f"stretto.Cluster(...), not {type(cluster).__name__}"
        )
    if cluster == "local":
        return None
    path = Path(cluster)
    if path.suffix == ".json":
        return load_calibration(path)
    if path.suffix == ".toml":
        return _from_toml(path)
    try:
        return named_cluster(cluster)
    except UsageError as error:
        raise UsageError(
            f'{error} (.toml), or give "local" to measure this machine, or a calibration (.json)'
        ) from None


def memory_limit(description: Description | None, job: Job) -> int | None:
    """Bytes of a device that a plan must fit in: as described, or of the devices here when there is no
    description. None where neither sets a limit: a calibration says nothing of it, and ranks on processors
    share what there is with others.

    Under torchrun all ranks must call it. Raises UsageError when this machine lacks a device of the job's
    kind.
    """
    if description is None:
        return memory_here(job)
    return description.memory_bytes if isinstance(description, (Cluster, Hardware)) else None


def _from_toml(path: Path) -> Cluster | Hardware:
    try:
        found = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}; give a cluster file, a name, or local"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from None
    if "device" in found:
        return load_cluster(path)
    try:
        return Cluster(**found)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None

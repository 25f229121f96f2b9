"""What costs come from without the machine at hand: a description of devices and links.

It is one of three: a `Cluster` of equal devices and links, `Hardware` of the catalogue (by name such as
`h100x64`, or a cluster file), or a `Calibration` that was measured before. None of them touches a device.
"""

from __future__ import annotations

from pathlib import Path

from stretto.errors import UsageError, near_path
from stretto.files.settings_file import read_toml
from stretto.ir.action import Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.mesh import Mesh
from stretto.ir.prices import Pricer
from stretto.ir.program import Job
from stretto.price.calibration import Calibration, load_calibration
from stretto.price.cluster_file import Hardware, load_cluster, named_cluster
from stretto.price.flat import Cluster, FlatPricer, described_costs, flat_link
from stretto.price.hardware import HardwarePricer, hardware_costs
from stretto.price.priced import calibrated_pricer, find_group, find_link, priced_costs
from stretto.price.roofline import ring_cost

Description = Cluster | Hardware | Calibration
"""What can be planned for without the machine at hand."""


def described(job: Job, schedule: Schedule, found: Description) -> tuple[Costs, Pricer]:
    """The costs of a job on what is described, and what prices the ops that passes make of it.

    Raises UsageError for a job that does not fit.
    """
    if isinstance(found, Cluster):
        return described_costs(job, found), FlatPricer(found)
    if isinstance(found, Hardware):
        return hardware_costs(job, schedule, found), HardwarePricer(found)
    return priced_costs(job, schedule, found), calibrated_pricer(job, schedule, found)


def place_link(found: Description, mesh: Mesh) -> Link:
    """What a message between neighbouring places of the pipeline costs. Raises UsageError for a calibration
    that holds no messages."""
    if isinstance(found, Cluster):
        return flat_link(found)
    if isinstance(found, Hardware):
        return found.place_link(dict(mesh.sizes), 0, 1)
    return find_link(found, mesh.world // mesh.size(PIPELINE)).link


def sum_cost(found: Description, mesh: Mesh, axis: str) -> CollectiveCost:
    """What sums of gradients along an axis cost. Raises UsageError for a calibration that holds none."""
    kind = ALL_REDUCE.name
    if isinstance(found, Cluster):
        return ring_cost(flat_link(found), kind, mesh.size(axis))
    if isinstance(found, Hardware):
        return found.collective(kind, dict(mesh.sizes), axis)
    return find_group(found, mesh, axis, kind).cost


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


def _from_toml(path: Path) -> Cluster | Hardware:
    if not path.exists():
        raise UsageError(
            f"{path}: there is no such file; {near_path(path, '{} ')}give a cluster file, a name, or local"
        )
    result = read_toml(path, "cluster file")
    if "device" in result:
        return load_cluster(path)
    try:
        return Cluster(**result)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None

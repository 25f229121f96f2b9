"""Ranks and coordinates name each other; groups partition the ranks that take part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.ir.axes import AXES
from stretto.ir.mesh import Mesh

MESH = Mesh((("pp", 2), ("dp", 3), ("tp", 2)))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    return Mesh(
        tuple((axis, draw(st.integers(1, 3))) for axis in AXES if axis == "pp" or draw(st.booleans()))
    )


def test_the_last_axis_is_the_fastest() -> None:
    assert MESH.world == 12
    assert MESH.coordinates(1) == {"pp": 0, "dp": 0, "tp": 1}
    assert MESH.coordinates(7) == {"pp": 1, "dp": 0, "tp": 1}
    assert MESH.size("cp") == 1


def test_groups_of_an_axis_and_of_messages() -> None:
    assert MESH.groups(("tp",), (0, 1)) == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert MESH.groups(("dp",), (0, 1, 2)) == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert MESH.groups(("pp",), (1, 0)) == ((6, 0), (7, 1), (8, 2), (9, 3), (10, 4), (11, 5))
    assert MESH.groups(("pp", "dp"), (0, 1)) == ((0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11))
    assert MESH.group(0, ("pp",), (1,)) is None


@given(meshes())
def test_ranks_and_coordinates_name_each_other(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.world)] == list(range(mesh.world))


@given(meshes(), st.data())
def test_groups_partition_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from([axis for axis, _ in mesh.sizes]))
    groups = mesh.groups((axis,), range(mesh.size(axis)))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        for rank in group:
            assert mesh.group(rank, (axis,), range(mesh.size(axis))) == group

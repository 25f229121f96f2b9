"""Kept op times: signatures, round trips, damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.ir.prices import signature
from stretto.ir.program import Const, Op, Ref, TensorSpec
from stretto.price import op_cache
from stretto.price.op_cache import Machine, OpCache, Timing, cache_folder

HERE = Machine("A processor (with signs) @ 2.6", "2.13.0", 2)
MM = Timing(12.5, 0.02, 4096, 8192)


def test_a_signature_says_shapes_layouts_and_numbers_and_no_names() -> None:
    specs = {"a": TensorSpec((2, 3), "float32"), "b": TensorSpec((3, 4), "bfloat16", (1, 3))}
    op = Op("mm_1", "aten.mm.default", (Ref("a"), Ref("b")))
    other = Op("mm_2", "aten.mm.default", (Ref("x"), Ref("y")))
    renamed = {"x": specs["a"], "y": specs["b"]}
    assert signature(op, specs) == "aten.mm.default(float32[2,3], bfloat16[3,4]{1,3})"
    assert signature(other, renamed) == signature(op, specs)
    listed = Op("c", "aten.cat.default", ((Ref("a"), Ref("b")), -1), (("dtype", Const("dtype", "float32")),))
    assert signature(listed, specs) == (
        "aten.cat.default([float32[2,3], bfloat16[3,4]{1,3}], -1, dtype=dtype:float32)"
    )
    assert signature(Op("s", "aten.sum.dim_IntList", (Ref("a"), (0,))), specs) != signature(
        Op("s", "aten.sum.dim_IntList", (Ref("a"), (1,))), specs
    )


def test_times_come_back_and_another_process_loses_none(tmp_path: Path) -> None:
    one, two = OpCache.open(HERE, tmp_path / "ops"), OpCache.open(HERE, tmp_path / "ops")
    one.ops["a"] = MM
    two.ops["b"] = Timing(1.0, 0.0, 0, 10)
    one.save()
    two.save()
    assert OpCache.open(HERE, tmp_path / "ops").ops == {"a": MM, "b": Timing(1.0, 0.0, 0, 10)}
    assert [path.suffix for path in (tmp_path / "ops").iterdir()] == [".json"], "no temporary file is left"


def test_machines_do_not_share_times(tmp_path: Path) -> None:
    cache = OpCache.open(HERE, tmp_path)
    cache.ops["a"] = MM
    cache.save()
    for other in (
        Machine(HERE.device, HERE.torch, 1),
        Machine(HERE.device, "2.12.0", 2),
        Machine("B", HERE.torch, 2),
    ):
        assert OpCache.open(other, tmp_path).ops == {}


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 1}', '{"version": 9, "machine": {}, "ops": {}}', "[]"]
)
def test_a_damaged_file_is_told_of_and_made_anew(tmp_path: Path, text: str) -> None:
    cache = OpCache.open(HERE, tmp_path)
    cache.path.write_text(text)
    with pytest.warns(UserWarning, match="cannot be used .* they will be measured again"):
        again = OpCache.open(HERE, tmp_path)
    assert again.ops == {}
    again.ops["a"] = MM
    with pytest.warns(UserWarning, match="measured again"):
        again.save()
    assert OpCache.open(HERE, tmp_path).ops == {"a": MM}


def test_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    cache = OpCache.open(HERE, tmp_path)
    cache.ops["a"] = MM
    cache.save()
    document = json.loads(cache.path.read_text())
    document["ops"]["a"]["us"] = -1
    cache.path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="ops.a.us: expected a number from 0"):
        OpCache.open(HERE, tmp_path)


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stretto" / "ops"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(op_cache.Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "home" / ".cache" / "stretto" / "ops"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = OpCache(HERE, tmp_path / "file" / "ops" / "x.json", {"a": MM})
    with pytest.raises(StrettoError, match=r"cannot keep op times in .*file/ops"):
        cache.save()

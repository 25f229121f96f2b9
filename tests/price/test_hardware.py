"""Jobs priced for clusters of the catalogue: by shape, by place, with no device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.ir.prices import price_list, specs_of, traffic_bytes
from stretto.ir.program import Job, Op, Ref, TensorSpec
from stretto.measure import measured
from stretto.measure.measured import memory_here
from stretto.price.cluster import HardwarePricer, describe, device_us, flat_link, hardware_costs
from stretto.price.cluster_file import Hardware, find_cluster
from stretto.price.efficiency import BACKWARD, FORWARD, Matmul, attention_product, convolution_products, op_us
from stretto.schedule.families import make_schedule
from tests.clusters import cores, cores_file
from tests.price.comm_job import comm_job, costs_on

H100 = find_cluster("h100x64")


def program_times(job: Job) -> dict[tuple[int, str], float]:
    return {key: priced.us for key, priced in price_list(job, HardwarePricer(H100)).items()}


def half(job: Job) -> Job:
    """The job in bfloat16, as accelerators compute."""

    def of(op: Op) -> Op:
        outputs = tuple(None if spec is None else replace(spec, dtype="bfloat16") for spec in op.outputs)
        return replace(op, outputs=outputs)

    return replace(
        job,
        stages=tuple(
            replace(s, ops={phase: tuple(map(of, ops)) for phase, ops in s.ops.items()}) for s in job.stages
        ),
        parameters=tuple(replace(p, spec=replace(p.spec, dtype="bfloat16")) for p in job.parameters),
        batch=tuple((name, replace(spec, dtype="bfloat16")) for name, spec in job.batch),
    )


def test_float32_products_are_slower_and_moving_memory_is_not() -> None:
    slow, fast = comm_job(1, tp=1, rows=4096, hidden=4096), half(comm_job(1, tp=1, rows=4096, hidden=4096))
    times = [program_times(job) for job in (slow, fast)]
    assert 10 < times[0][0, "h0"] / times[1][0, "h0"] < 17
    assert times[0][0, "y0"] / times[1][0, "y0"] == pytest.approx(2.0, rel=0.2), "relu moves twice the bytes"


def test_a_program_of_small_ops_takes_as_long_as_their_launches() -> None:
    job = comm_job(1, tp=2, rows=8, hidden=8)
    times = program_times(job)
    launch_us = H100.roof.efficiency.launch_us
    for phase, ops in job.stages[0].ops.items():
        launching = [op for op in ops if times[0, op.name]]
        total = sum(times[0, op.name] for op in ops)
        assert total >= len(launching) * launch_us * 0.999, phase
    assert times[0, "w1t0"] == times[0, "y0"] == 0.0, "views and waits are free"
    assert times[0, "ag0"] >= launch_us, "the start of a collective costs its launch"


def test_tensor_parallel_peers_are_in_a_node_and_pipelines_leave_it() -> None:
    job = comm_job(2, tp=4, dp=4, rows=64, hidden=128)
    costs = costs_on(job, make_schedule("1f1b", 2, 2), "h100x64")
    assert "in one node" in costs.collectives["tp", "all_reduce"].source
    assert "nodes" in costs.collectives["dp", "all_reduce"].source.replace("in one node", "")
    assert "between nodes" in costs.link(0, 1).source
    assert costs.shared == ("dp",)
    within = costs_on(comm_job(2), make_schedule("1f1b", 2, 2), "h100x8")
    assert within.shared == ()
    assert within.link(0, 1).bytes_per_us > costs.link(0, 1).bytes_per_us
    assert 0 < within.collectives["tp", "all_reduce"].slowdown < 1


def test_fused_attention_is_priced_by_its_products() -> None:
    """Tiles on the diagonal are full; the last of fewer queries than keys see more than half of these."""
    for queries, keys, causal, name, expected in (
        (1024, 1024, False, "", 2),
        (1024, 1024, True, "", 2 * (0.5 + 256 / 1024 / 2)),
        (2048, 4096, True, "", 2 * (1 - (2048 - 256) / 8192)),
        (1024, 1024, False, "_backward", 5),
    ):
        specs = dict.fromkeys("gqo", TensorSpec((2, 8, queries, 64), "bfloat16"))
        specs |= dict.fromkeys("kv", TensorSpec((2, 8, keys, 64), "bfloat16"))
        args = tuple(map(Ref, "gqkvo")) if name else (*map(Ref, "qkv"), 0.0, causal)
        target = f"aten._scaled_dot_product_flash_attention{name}.default"
        op = Op("y", target, args, (), (specs["q"],))
        assert attention_product(op, specs) == (Matmul(queries, keys, 64, 16), expected)
    assert attention_product(Op("y", "aten.mm.default", (Ref("q"), Ref("k"))), specs) is None


MEASURED = {
    ("flash", 1024, 64, True): (170, 600),
    ("flash", 8192, 64, True): (980, 2766),
    ("flash", 2048, 128, True): (475, 1600),
    ("flash", 2048, 128, False): (775, 2595),
    ("cudnn", 2048, 64, True): (177, 564),
    ("cudnn", 8192, 128, True): (905, 2650),
    ("efficient", 1024, 64, True): (320, 1009),
    ("efficient", 2048, 64, False): (1058, 3234),
    ("efficient", 8192, 128, False): (6195, 19913),
}
"""Microseconds (forward, backward) of 16,384 tokens of 16 heads in bfloat16 on one H100, PyTorch 2.11: by
kernel, length, dim of a head, and whether it is causal."""


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_each_kernel_of_attention_has_a_price_of_its_own(case: tuple[str, int, int, bool]) -> None:
    kernel, length, width, causal = case
    shape = TensorSpec((16384 // length, 16, length, width), "bfloat16")
    specs = dict.fromkeys("gqkvo", shape)
    between = {"flash": (), "cudnn": (None, True), "efficient": (None, True)}[kernel]
    target = f"aten._scaled_dot_product_{kernel}_attention"
    forward = Op(
        "y",
        f"{target}.default",
        (*map(Ref, "qkv"), *between, 0.0, causal),
        (),
        (shape, None),
    )
    ends: dict[str, tuple[Any, ...]] = {
        "flash": (None, None, None, length, length, 0.0, causal),
        "cudnn": (None, None, None, None, None, None, length, length, 0.0, causal),
        "efficient": (None, None, None, 0.0, (True, True, True, False), causal),
    }
    operands = (*map(Ref, "gqkv"), *((None,) if kernel == "efficient" else ()), Ref("o"))
    backward = Op("y", f"{target}_backward.default", (*operands, *ends[kernel]), (), (shape, shape, shape))
    for op, us in zip((forward, backward), MEASURED[case], strict=True):
        assert us / 1.4 < device_us(op, specs, H100) < us * 1.4


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(stretto.UsageError, match="pp = 2, tp = 8 needs 16 devices, but h100x8 has 8"):
        hardware_costs(comm_job(2, tp=8), make_schedule("1f1b", 2, 2), find_cluster("h100x8"))


def test_devices_at_hand_set_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the least memory, for all ranks alike."""
    job = replace(comm_job(2, tp=2), device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(stretto.UsageError, match="this machine has no such device"):
        memory_here(job)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
    )
    assert memory_here(job) == 80 * 2**30
    monkeypatch.setattr(measured.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(measured.dist, "get_world_size", lambda: 3)

    def gather(found: list[int], mine: int) -> None:
        found[:] = [mine, 40 * 2**30, mine]

    monkeypatch.setattr(measured.dist, "all_gather_object", gather)
    assert memory_here(job) == 40 * 2**30


def test_names_and_files_are_told_apart(tmp_path: Path) -> None:
    assert describe("local") is None
    wrong: Any = 3
    with pytest.raises(stretto.UsageError, match=r"a cluster is \"local\", .* not int"):
        describe(wrong)
    assert isinstance(describe("h100x64"), Hardware)
    (tmp_path / "flat.toml").write_text(cores_file(link_gbps=0.0125))
    flat = describe(str(tmp_path / "flat.toml"))
    assert isinstance(flat, stretto.Cluster)
    assert flat_link(flat).bytes_per_us == 12.5
    (tmp_path / "mine.toml").write_text('device = "h100"\ncount = 16\n')
    mine = describe(str(tmp_path / "mine.toml"))
    assert isinstance(mine, Hardware)
    job = comm_job(2, tp=2)
    assert memory_here(job) is None, "processors share their memory with others"
    with pytest.raises(stretto.UsageError, match=r"unknown cluster .* calibration"):
        describe("h100")
    for name, text, key in (
        ("none", None, "no such file"),
        ("wrong", cores_file(link_gbps=0), "link_gbps"),
        ("odd", "link_gbps =\n", "not TOML"),
    ):
        if text is not None:
            (tmp_path / f"{name}.toml").write_text(text)
        with pytest.raises(stretto.UsageError, match=f"{name}.toml.*{key}"):
            describe(str(tmp_path / f"{name}.toml"))


def test_a_flat_description_prices_collectives_as_rings() -> None:
    job = comm_job(1, tp=4, rows=64, hidden=128)
    cluster = cores(latency_us=7.0, link_gbps=0.05, processor_us_per_mb=3.0)
    costs = costs_on(job, make_schedule("1f1b", 1, 2), cluster)
    gather, reduce = (costs.collectives["tp", kind] for kind in ("all_gather", "all_reduce"))
    assert gather.curve.us(200_000) == pytest.approx(3 * 7.0 + 3 / 4 * 200_000 / 50.0)
    assert reduce.curve.us(200_000) == pytest.approx(2 * gather.curve.us(200_000))
    assert reduce.processor_us_per_mb == pytest.approx(2 * 3 / 4 * 3.0)
    assert costs.op_us[0, "y0"] == 0.0, "the wait of a collective is no work"


def test_an_op_moves_what_it_reads_once_and_all_that_it_makes() -> None:
    specs = specs_of(comm_job(1, tp=1))
    assert specs["tangent"] == comm_job(1, tp=1).loss_spec
    made = TensorSpec((3,), "float32")
    op = Op("pair", "aten.max.dim", (Ref("a"), Ref("a")), (), (made, made))
    assert traffic_bytes(op, {"a": TensorSpec((2,), "float64")}) == 2 * 8 + 2 * 3 * 4


def convolution(dtype: str = "bfloat16", groups: int = 1) -> tuple[Op, Op, dict[str, TensorSpec]]:
    """One of 3 by 3 with a stride of 2, forward and backward, with what they read."""
    specs = {
        "x": TensorSpec((64, 320, 32, 32), dtype),
        "w": TensorSpec((640, 320 // groups, 3, 3), dtype),
        "g": TensorSpec((64, 640, 16, 16), dtype),
    }
    how = ((2, 2), (1, 1), (1, 1), False, (0, 0), groups)
    forward = Op("y", FORWARD, (Ref("x"), Ref("w"), None, *how), (), (specs["g"],))
    arguments = (Ref("g"), Ref("x"), Ref("w"), (0,), *how, (True, True, False))
    backward = Op("d", BACKWARD, arguments, (), (specs["x"], specs["w"], None))
    flops = 2 * 64 * 16 * 16 * 640 * (320 // groups) * 9
    return replace(forward, flops=flops), replace(backward, flops=2 * flops), specs


def test_convolutions_are_priced_by_their_products() -> None:
    forward, backward, specs = convolution()
    places, kernel = 64 * 16 * 16, 320 * 9
    assert convolution_products(forward, specs) == (Matmul(places, 640, kernel),)
    of_input, of_weight = convolution_products(backward, specs) or ()
    assert of_input == Matmul(64 * 32 * 32, 320, 640 * 9 // 4)
    assert of_weight == Matmul(640, kernel, places)
    assert of_input.flops == of_weight.flops == forward.flops == backward.flops / 2
    for wanted, products in (((True, False, False), (of_input,)), ((False, True, False), (of_weight,))):
        asked = replace(backward, args=(*backward.args[:-1], wanted))
        assert convolution_products(asked, specs) == products
    sheet = H100.roof.flops_per_us
    assert 0.5 * sheet < forward.flops / device_us(forward, specs, H100) < sheet
    assert 0.3 * sheet < backward.flops / device_us(backward, specs, H100) < sheet


def test_products_of_a_convolution_are_those_that_pytorch_counts() -> None:
    """Plain and transposed ones, captured: the arithmetic of both directions."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1),
        nn.Conv2d(6, 4, 1),
    )
    job = stretto.capture(
        model, torch.zeros(4, 3, 8, 8), lambda m, x: m(x).square().mean(), stretto.Parallel()
    )
    specs, seen = specs_of(job), 0
    for op in (op for ops in job.stages[0].ops.values() for op in ops):
        products = convolution_products(op, specs)
        if products is not None:
            assert sum(product.flops for product in products) == pytest.approx(op.flops)
            seen += len(products)
    assert seen == 3 + 5, "the first one's input wants no gradient"


def test_convolutions_in_groups_are_no_matrix_products() -> None:
    forward, backward, specs = convolution(groups=320)
    assert convolution_products(forward, specs) is convolution_products(backward, specs) is None
    assert device_us(forward, specs, H100) == op_us(0.0, traffic_bytes(forward, specs), None, H100.roof)


def test_convolutions_of_float32_run_in_tf32() -> None:
    """Where arithmetic binds, half as fast as in half precision, as on the sheet."""
    us = [device_us(*convolution(dtype)[::2], H100) for dtype in ("bfloat16", "float32", "float64")]
    assert us[1] / us[0] == pytest.approx(2, rel=0.1)
    assert us[2] / us[0] == pytest.approx(16, rel=0.1)

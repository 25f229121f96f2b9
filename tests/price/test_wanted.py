"""Which collectives are measured, and at which sizes."""

from __future__ import annotations

from dataclasses import replace

from stretto.price.shared import SMALL_BYTES, elements, sweep, wanted_collectives
from tests.price.comm_job import comm_job


def test_a_job_wants_the_sizes_of_its_ops_first() -> None:
    job = comm_job(2, tp=2, dp=2, rows=64, hidden=128)
    found = {(w.axis, w.kind): w for w in wanted_collectives(job)}
    assert set(found) == {
        ("dp", "all_reduce"),
        ("tp", "all_reduce"),
        ("tp", "all_gather"),
        ("tp", "reduce_scatter"),
    }
    full = 64 * 128 * 4
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert found["tp", kind].sizes == (full, SMALL_BYTES, full // 2, 2 * full)
        assert found["tp", kind].dtype == "float32"
    up = 128 * 256 * 4
    assert found["dp", "all_reduce"].sizes == (SMALL_BYTES, 2 * up, 4 * up), "the loss; a stage's gradients"


def test_gradients_are_summed_in_their_own_dtype() -> None:
    job = comm_job(1, tp=1, dp=2)
    half = [replace(p.spec, dtype="bfloat16") for p in job.parameters]
    mixed = replace(
        job,
        parameters=tuple(
            replace(p, spec=spec, own_dtype="float32") for p, spec in zip(job.parameters, half, strict=True)
        ),
    )
    (wanted,) = wanted_collectives(mixed)
    assert wanted.dtype == "float32"
    (wanted,) = wanted_collectives(
        replace(mixed, parameters=tuple(replace(p, own_dtype=None) for p in mixed.parameters))
    )
    assert wanted.dtype == "bfloat16"


def test_partial_gradients_are_summed_along_their_axis() -> None:
    job = comm_job(1, tp=2)
    assert job.parameters[0].grad_nbytes not in {s for w in wanted_collectives(job) for s in w.sizes}
    partial = replace(job, parameters=(replace(job.parameters[0], partial=("tp",)), *job.parameters[1:]))
    found = {w.kind: w for w in wanted_collectives(partial) if w.axis == "tp"}
    assert job.parameters[0].grad_nbytes in found["all_reduce"].sizes


def test_a_job_without_axes_wants_nothing() -> None:
    assert wanted_collectives(comm_job(2, tp=1)) == ()


def test_many_sizes_are_thinned_out_and_keep_their_ends() -> None:
    asked = [10_000 * k for k in range(1, 50)]
    found = sweep(asked)
    assert len(found) <= 9
    assert {10_000, 490_000, 980_000, SMALL_BYTES} <= set(found)


def test_members_split_a_tensor_evenly() -> None:
    for nbytes in (1, 100, 4096, 1_000_003):
        for members in (2, 3, 8):
            count = elements(nbytes, "float32", members)
            assert count % members == 0
            assert count >= members
            assert abs(count * 4 - nbytes) <= 4 * members

"""Files that are no plans: each names the file, the place and the trouble; no text gives a traceback."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import UsageError
from stretto.ir.serialize import plan_from_text
from tests.ir.odd import DOCUMENT, TEXT, changed

SUM = ["s", "aten.sum.default", ["%batch/x"], [], ["float32[]"]]
OPS = ("job", "stages", 0, "ops", "F")
SUMS = ("job", "stages", 0, "ops", "REDUCE_GRAD")
US = ("costs", "op_us", 2, 2)
MALFORMED = [
    # (text, message)
    ('{"format": }', r"p\.json, line 1, column 12: not JSON"),
    ("", r"p\.json, line 1, column 1: not JSON"),
    ("[model]\nlayers = 2\n", r"not JSON"),
    ("layers = 2\n", r"p\.json: not a plan file, which is JSON\. Make one with `stretto plan`"),
    ("[" * 100_000, "nested too deeply"),
    ('{"a": ' + "1" * 5000 + "}", "not readable as JSON"),
    ('{"a": NaN}', "NaN is not JSON"),
    ('{"a": 1, "a": 2}', "has the key 'a' twice"),
    ("[]", r"p\.json: expected an object, found \[\]"),
    ("{}", 'not a plan file: expected "format": "stretto-plan"'),
    (changed("version", to=1), "version 1 cannot be read: this Stretto reads version 22"),
    (changed("version", to=...), "version None cannot be read"),
    (changed("orders", to=...), r"p\.json: the key 'orders' is missing"),
    (changed("extra", to=1), r"p\.json: unknown key 'extra'; known are: job, schedule, windows"),
    (changed("job", "loss", to=[1]), r"job\.loss: expected a list of 2, found \[1\]"),
    (changed("job", "count", to=3), r"job\.count: expected an object, found 3"),
    (changed("job", "count", to={"value": 0, "ops": []}), r"job\.count\.value: expected the name of one of"),
    (changed("job", "count", to={"value": "n", "ops": []}), r"job\.count\.value: no op makes one number 'n'"),
    (changed("job", "mean_over", to={"value": "n", "ops": [SUM]}), r"job\.mean_over\.value: no op makes one"),
    (changed("job", "count", to={"value": "s", "ops": [SUM, SUM]}), r"job\.count\.ops\[1\]: op 's' is there"),
    (
        changed("job", "count", to={"value": "s", "ops": [[*SUM[:2], ["%param/w0"], *SUM[3:]]]}),
        r"job\.count\.ops\[0\]: no op before it makes 'param/w0'",
    ),
    (
        changed("job", "count", to={"value": "s", "ops": [["s", "axis.index", ["'tp", 2], [], ["int64[]"]]]}),
        r"job\.count\.ops\[0\]: a count is made of plain ops, which neither draw nor communicate",
    ),
    (changed("job", "replicated", to=["y"]), r"job\.replicated\[0\]: the batch has no leaf 'y'"),
    (changed("job", "microbatches", to="3"), r'job\.microbatches: expected an integer, found "3"'),
    (changed("job", "microbatches", to=True), r"job\.microbatches: expected an integer, found true"),
    (changed(*OPS, 0, to=["a"]), r"job\.stages\[0\]\.ops\.F\[0\]: expected \[name, target, args, "),
    (changed(*OPS, 0, 4, 0, to="f32"), r"ops\.F\[0\]\[4\]\[0\]: cannot read 'f32': cannot read tensor"),
    (changed(*OPS, 0, 2, 0, to="h0"), r"ops\.F\[0\]\[2\]\[0\]: cannot read the argument 'h0': write %name"),
    (changed(*OPS, 0, 5, to={"size": 1}), r"ops\.F\[0\]\[5\]: unknown key 'size'"),
    (changed(*OPS, 2, 5, "random", to=1), r"expected true or false, found 1"),
    (changed("job", "stages", 0, "ops", "W", to=...), r"job\.stages\[0\]\.ops: the program W is missing"),
    (changed("job", "edges", 0, "phase", to="B"), r"job\.edges\[0\]: stage 0 makes no value 'y0' in its B"),
    (changed("job", "constants", 0, "data", to=[1]), r"constants\[0\]\.data: float32\[3\] has 3 elements,"),
    (changed("schedule", "orders", 1, 2, to="1X0"), r"schedule\.orders\[1\]\[2\]: cannot read '1X0'"),
    (
        changed("windows", "0F", "parts", 0, 1, to="X"),
        r'windows\["0F"\]\.parts\[0\]\[1\]: expected F or I or',
    ),
    (changed("windows", "0F", "items", 0, to="wait ex"), r'windows\["0F"\]\.items\[0\]: cannot read'),
    (changed("orders", 1, 4, to="fly e0:0"), r"orders\[1\]\[4\]: cannot read 'fly e0:0'"),
    (changed("orders", 1, 4, to=None), r"orders\[1\]\[4\]: expected text, found null"),
    (changed("costs", "action_us", to="fast"), r'costs\.action_us: expected a number, or "inf"'),
    (changed(*US, to=10**400), r"not readable as JSON \(a number of 401 digits is too large: 1000"),
    (changed(*US, to=-1.0), r"costs\.op_us\[2\]\[2\]: expected a number from 0 to 1e\+15, found -1"),
    (changed("costs", "skew", to="nan"), r"costs\.skew: expected a number from 0 to 1e\+15, found \"nan\""),
    (changed("costs", "links", 0, 2, "latency_us", to=-5), r"links\[0\]\[2\]\.latency_us: expected a number"),
    (
        changed("costs", "links", 0, 2, "bytes_per_us", to=0),
        r"links\[0\]\[2\]\.bytes_per_us: expected a rate",
    ),
    (
        changed("costs", "collectives", 0, 2, "slowdown", to=1.5),
        r"collectives\[0\]\[2\]\.slowdown: expected a share from 0 to 1",
    ),
    (changed(*US, to=1e308), r"costs\.op_us\[2\]\[2\]: expected a number from 0 to 1e\+15, found 1e\+308"),
    (
        changed("costs", "links", 0, 2, "bytes_per_us", to=1e-300),
        r"links\[0\]\[2\]\.bytes_per_us: expected a",
    ),
    (changed("costs", "collectives", 0, 2, "curve", "points", 0, 1, to=-2.0), r"curve: point 0 of a curve,"),
    # What becomes the source of a function.
    (changed(*OPS, 0, 3, to=[["**[print(1)][1], dtype", 1]]), r"ops\.F\[0\]\[3\]\[0\]\[0\]: expected a"),
    (changed(*OPS, 0, 3, to=[["import", 1]]), r"expected a keyword argument's name, found \"import\""),
    (changed(*OPS, 0, 3, to=[["a", 1], ["a", 2]]), r"ops\.F\[0\]: a keyword argument is there twice"),
    (changed(*OPS, 0, to=["g", "getitem", [], [], ["float32[1]"]]), r"ops\.F\[0\]: a getitem takes"),
    (changed(*OPS, 0, to=["g", "getitem", ["%x", -1], [], ["float32[1]"]]), r"ops\.F\[0\]: a getitem takes"),
    (
        changed(*OPS, 0, to=["h0", "aten.mm.default", [], [], ["float32[1]"], {"flops": -1}]),
        r"ops\.F\[0\]\[5\]\.flops: expected a count from 0",
    ),
    (
        changed("costs", "op_us", 0, 0, to="x"),
        r"costs\.op_us\[0\]\[0\]: expected an integer, found \"x\"",
    ),
    (changed("costs", "links", 1, to=DOCUMENT["costs"]["links"][0]), r"costs\.links\[1\]: 0, 1 is there"),
    # references
    (changed("job", "stages", to=[]), r"job\.stages: a job has at least one stage"),
    (changed("job", "stages", 0, "index", to=1), r"job\.stages\[0\]\.index: stages are numbered in order"),
    (changed(*OPS, 1, 0, to="h0"), r"job\.stages\[0\]\.ops\.F\[1\]: op 'h0' is there twice"),
    (changed("job", "stages", 0, "ops", "W", 0, 0, to="g0"), r"ops\.W\[0\]: op 'g0' is there twice"),
    (changed(*OPS, 0, 2, 0, to="%param/none"), r"ops\.F\[0\]: stage 0 is not given 'param/none'"),
    (changed("job", "stages", 0, "ops", "W", 1, 4, to=[]), r"parameters\[0\]\.grads\[0\]: stage 0 makes no"),
    (changed(*OPS, 0, 4, to=[]), r"ops\.F\[1\]: reads 'h0', which is no tensor"),
    (changed(*OPS, 2, 5, "alias", to="odd"), r"ops\.F\[2\]: is a view of itself, by way of 'odd'"),
    (changed(*OPS, 2, 5, "alias", to="y1"), r"ops\.F\[2\]: is a view of 'y1', which stage 0 does not have"),
    (changed("job", "loss", to=[9, "loss"]), r"job\.loss: there is no stage 9; the job has 2"),
    (changed("job", "loss", to=[0, "loss"]), r"job\.loss: stage 0 makes no value 'loss' in its F program"),
    (changed("job", "edges", 0, "index", to=3), r"job\.edges\[0\]: edges are numbered in order"),
    (changed("job", "edges", 0, "value", to="q"), r"job\.edges\[0\]: stage 0 makes no value 'q'"),
    (changed("job", "edges", 0, "spec", to="int64[]"), r"carries int64\[\], but 'y0' is float32\[256,512\]"),
    (changed("job", "edges", 0, "target", to=5), r"job\.edges\[0\]: there is no stage 5"),
    (changed("job", "edges", 0, "target", to=0), r"job\.edges\[0\]: leads from stage 0 to itself"),
    (changed("job", "edges", 0, "user_phase", to="W"), r"user_phase is W, but F is the first to read 'y0'"),
    (changed("job", "edges", 0, "value", to="h0"), r"user_phase is F, but no op of stage 1 reads 'h0'"),
    (changed("job", "parameters", 0, "tied_to", to="w9"), r"tied_to: there is no parameter 'w9'"),
    (
        changed("job", "parameters", 0, "stages", to=[0, 7]),
        r"parameters\[0\]\.stages\[1\]: there is no stage",
    ),
    (
        changed("job", "parameters", 0, "grads", 0, 2, to="x"),
        r"parameters\[0\]\.grads\[0\]: stage 0 makes no",
    ),
    (changed("job", "buffers", 0, "stages", to=[0, -1]), r"buffers\[0\]\.stages\[1\]: there is no stage -1"),
    (changed("job", "buffers", 0, "updates", 0, 0, to=4), r"buffers\[0\]\.updates\[0\]: there is no stage 4"),
    (
        changed("schedule", "orders", to=[]),
        r"schedule\.orders: orders of 0 ranks, but the plan has orders of",
    ),
    (
        changed("schedule", "stage_ranks", 1, to=2),
        r"schedule\.stage_ranks\[1\]: there is no rank 2; the plan",
    ),
    (
        changed("schedule", "stage_ranks", to=[0]),
        r"schedule\.stage_ranks: places 1 stages, but the job has 2",
    ),
    (changed("windows", "0F", "parts", to=[]), r'windows\["0F"\]\.parts: a window has at least one part'),
    (changed("windows", "0F", "parts", 0, 0, to=7), r'windows\["0F"\]\.parts\[0\]: there is no stage 7'),
    (changed("windows", "0F", "items", 0, to="dw0"), r"items\[0\]: stage 0 has no op 'dw0' in its F program"),
    (changed("windows", "0F", "items", 0, to="#1 h0"), r"items\[0\]: there is no part 1; the window has 1"),
    (changed("windows", "0F", "items", 2, to="send e9"), r"items\[2\]: there is no edge e9; the job has 2"),
    (changed("orders", 0, 2, to="run 9F:0"), r"orders\[0\]\[2\]: there is no window '9F'"),
    (changed("orders", 0, 2, to="run 0F:0,1"), r"orders\[0\]\[2\]: window 0F takes 1 microbatches, found 2"),
    (changed("orders", 0, 0, to="recv e8:0"), r"orders\[0\]\[0\]: there is no edge e8"),
    (changed("orders", 0, 0, to="recv e1:0,1"), r"orders\[0\]\[0\]: recv takes one microbatch, found 2"),
    (changed("orders", 0, 0, to="reduce w7"), r"orders\[0\]\[0\]: .*'reduce' is not a valid"),
    (changed("communicators", 0, "ranks", to=[0, 5]), r"communicators\[0\]\.ranks\[1\]: there is no rank 5"),
    (
        changed("job", "axes", 0, 0, to="pp"),
        r"job\.axes\[0\]\[0\]: expected an axis of dp, dp_shard, cp, ep, tp, found",
    ),
    (changed("job", "axes", 1, 1, to=0), r"job\.axes\[1\]\[1\]: expected an integer from 1, found 0"),
    (changed("job", "axes", 1, to=["tp"]), r"job\.axes\[1\]"),
    (changed("job", "parameters", 0, "shards", 0, to=["tp", 1]), r"parameters\[0\]\.shards\[0\]"),
    (changed("job", "parameters", 1, "partial", 0, to=3), r"parameters\[1\]\.partial\[0\]"),
    (changed("communicators", 3, "axes", to=["ep"]), r"communicators\[3\]\.axes: there is no axis ep"),
    (changed("communicators", 3, "axes", to=[]), r"communicators\[3\]\.axes: name an axis"),
    (changed("communicators", 3, "ranks", 1, to=2), r"ranks\[1\]: there is no rank 2 on tp, which has 2"),
    (changed(*SUMS, 2, 0, to="tp.0.0"), r"REDUCE_GRAD\[2\]: op 'tp\.0\.0' is there twice"),
    (changed(*SUMS, 0, 2, 2, to="'q"), r"REDUCE_GRAD\[0\]: tp\.0\.0: there is no communicator 'q'"),
    (changed(*SUMS, 0, 2, 0, to="%grad/q"), r"REDUCE_GRAD\[0\]: tp\.0\.0: there is no 'grad/q' before it"),
    (changed(*SUMS, 0, 2, 0, to="%h0"), r"REDUCE_GRAD\[0\]: tp\.0\.0: there is no 'h0' before it"),
    (changed(*SUMS, 0, 2, 0, to=["%grad/w0"]), r"tp\.0\.0: comm\.all_reduce cannot be read with these"),
    (changed(*SUMS, 0, 2, 3, to=2.5), r"REDUCE_GRAD\[0\]: tp\.0\.0: comm\.all_reduce cannot be read"),
    (changed(*SUMS, 0, 5, "writes", to=["grad/w0"]), r"REDUCE_GRAD\[0\]: tp\.0\.0: comm\.all_reduce cannot"),
    (changed(*SUMS, 1, 2, 0, to="%h0"), r"REDUCE_GRAD\[1\]: tp\.0\.0\.sum: there is no 'h0' before it"),
    (changed(*SUMS, 1, 2, to=[]), r"tp\.0\.0\.sum: comm\.wait cannot be read with these arguments"),
    (changed(*SUMS, 1, 5, "writes", to=["grad/q"]), r"tp\.0\.0\.sum: there is no 'grad/q' to write"),
    (changed(*SUMS, 1, 1, to="state.free"), r"tp\.0\.0\.sum: state\.free cannot be read with these"),
    (changed("costs", "collectives", 0, 1, to="all_reduce"), r"collectives\[1\]: tp, all_reduce is there"),
    (changed("costs", "collectives", 0, 2, "curve", "points", to=[]), "a curve needs at least one point"),
    (changed("costs", "collectives", 0, 2, "curve", "points", 0, to=[1]), r"curve\.points\[0\]: expected a"),
    (changed("costs", "collectives", 0, 2, "curve", "points", 1, 1, to=1), r"1\.0 us is faster than fewer"),
    (changed("costs", "op_us", 0, 1, to="zz"), r"costs\.op_us: stage 0 has no op 'zz'"),
    (changed("costs", "links", 0, 1, to=6), r"costs\.links: there is no link from rank 0 to rank 6"),
    (changed("prediction", "peak_bytes", to=[1]), r"prediction\.peak_bytes: 1 ranks, but the plan has 2"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED, ids=[message[:60] for _, message in MALFORMED])
def test_malformed_files_name_file_and_place(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        plan_from_text(text, "p.json")
    assert str(caught.value).startswith("p.json")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 40), st.text(max_size=4))
def test_damaged_text_loads_or_is_refused(start: int, length: int, junk: str) -> None:
    """With a message that names the file; anything else fails the test."""
    refusal = "p.json"
    try:
        plan_from_text(TEXT[:start] + junk + TEXT[start + length :], "p.json")
    except UsageError as error:
        refusal = str(error)
    assert refusal.startswith("p.json")

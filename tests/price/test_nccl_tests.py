"""Outputs of nccl-tests become curves, whatever is around them; what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.errors import UsageError
from stretto.price.nccl_tests import read_nccl_tests

RANKS = "\n".join(
    f"#  Rank {r:2d} Group  0 Pid   68{r:02d} on    node-0 device  {r} [0000:0{r}:00] NVIDIA H100 80GB HBM3"
    for r in range(4)
)

NEW = f"""NCCL_DEBUG=WARN is set
# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{RANKS}
NCCL version 2.28.7+cuda13.0
#
#                                                              out-of-place                       in-place
#   size     count    type   redop  root   time   algbw   busbw  #wrong   time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
    1024     256   float   sum    -1  20.50  0.05  0.07   0  19.00  0.05  0.08   0
node-0:12:34 [0] NCCL INFO something in between
   1048576    262144   float   sum    -1  40.00   26.21   39.32   0  39.00   26.89   40.33   0
  67108864    16777216   float   sum    -1  500.0  134.22  201.33   N/A  501.0  133.95  200.93   N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 80.2413
#
# Collective test concluded: all_reduce_perf
"""

GATHER = NEW.replace("all_reduce_perf", "all_gather_perf").replace("   sum ", "  none ")

OLD = f"""$ ./build/sendrecv_perf -b 8 -e 64M -f 2 -g 4
# nThread 1 nGpus 4 minBytes 8 maxBytes 67108864 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{RANKS}
#
#                                                     out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2   float    10.00    0.00    0.00  0e+00    11.00    0.00    0.00    N/A
    67108864      16777216   float    300.0  223.70  223.70  0e+00    301.0  222.95  222.95    N/A
"""


def write(tmp_path: Path, text: str, name: str = "out.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_text_with_noise_around_it(tmp_path: Path) -> None:
    ((key, curve),) = read_nccl_tests(write(tmp_path, NEW)).items()
    assert key == ("all_reduce", 4)
    assert [curve.us(x) for x in (1024, 1048576, 67108864)] == [20.5, 40.0, 500.0]


def test_several_runs_in_one_file(tmp_path: Path) -> None:
    exchange = GATHER.replace("all_gather_perf", "alltoall_perf")
    found = read_nccl_tests(
        write(tmp_path, NEW + "COMMAND: all_gather_perf -b 8\n" + GATHER + exchange + OLD)
    )
    assert set(found) == {("all_reduce", 4), ("all_gather", 4), ("all_to_all", 4), ("send", 4)}
    assert found["send", 4].us(67108864) == 300.0


def test_a_size_that_was_run_twice_counts_by_the_faster(tmp_path: Path) -> None:
    again = NEW.replace("40.00   26.21", "35.00   29.96").replace("20.50 ", "99.00 ")
    curve = read_nccl_tests(write(tmp_path, NEW + again))["all_reduce", 4]
    assert (curve.us(1048576), curve.us(1024)) == (35.0, 20.5)


def test_lines_that_a_launcher_marked(tmp_path: Path) -> None:
    marked = "\n".join(f"[1,0]<stdout>:{line}" for line in NEW.splitlines())
    assert read_nccl_tests(write(tmp_path, marked)) == read_nccl_tests(write(tmp_path, NEW, "plain.txt"))


def test_blank_columns_of_programs_without_a_reduction(tmp_path: Path) -> None:
    blank = NEW.replace("   sum    -1", "            ")
    assert blank != NEW
    curve = read_nccl_tests(write(tmp_path, blank))["all_reduce", 4]
    assert curve.us(1048576) == 40.0


def test_a_table_alone_is_known_by_its_rates(tmp_path: Path) -> None:
    nameless = NEW.replace("all_reduce_perf", "")
    assert ("all_reduce", 4) in read_nccl_tests(write(tmp_path, nameless))


def whole_json(**changes: object) -> dict[str, object]:
    rows = [
        {
            "size": size,
            "out_of_place": {"time": us, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0.0},
            "in_place": None,
        }
        for size, us in ((1024, 20.5), (1048576, 40.0))
    ]
    devices = [{"rank": rank, "group": 0, "hostname": "node-0"} for rank in range(8)]
    full: dict[str, object] = {
        "version": 2,
        "args": ["/opt/nccl-tests/build/reduce_scatter_perf", "-b", "1k"],
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": rows,
    }
    return full | changes


def test_json(tmp_path: Path) -> None:
    found = read_nccl_tests(write(tmp_path, json.dumps(whole_json()), "out.json"))
    assert set(found) == {("reduce_scatter", 8)}
    assert found["reduce_scatter", 8].us(1048576) == 40.0


def test_json_of_one_process_counts_its_devices(tmp_path: Path) -> None:
    config = {"nthreads": 1, "ngpus": 4, "devices": [{"rank": 0}]}
    found = read_nccl_tests(write(tmp_path, json.dumps(whole_json(config=config)), "out.json"))
    assert set(found) == {("reduce_scatter", 4)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing here\n", "no nccl-tests result"),
        (NEW.replace(RANKS, ""), "no ranks"),
        (NEW.replace(" 40.00 ", " fast "), "out.txt:18: cannot read"),
        (NEW.replace(" 40.00 ", " 0.00 "), "out.txt:18: a time"),
        (NEW.replace("all_reduce_perf", "").replace("201.33", "134.22"), "names its program"),
        (NEW.replace("#  Rank  0", f"#  Rank  {'9' * 5000}"), "no output of nccl-tests"),
        ('{"config": }', "out.txt:1: is not JSON"),
        ('{"config": {}}', "keys config and results"),
        *(
            (json.dumps(whole_json(**changes)), r"nccl-tests|results\[0\]")
            for changes in (
                {"results": [{"size": 8}]},
                {"results": [7]},
                {"config": {"devices": [3]}},
                {"config": {"nthreads": "x"}},
                {"args": 5},
            )
        ),
    ],
)
def test_refusals(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_nccl_tests(write(tmp_path, text))
    with pytest.raises(UsageError, match="is no file"):
        read_nccl_tests("/dev/zero")

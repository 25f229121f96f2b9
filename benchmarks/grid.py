"""What plans of 36 jobs promise and what planning takes: the planner before and after a change.

    python -m benchmarks grid --out FILE.json              # plans the jobs, writes and prints their figures
    python -m benchmarks grid --compare OLD.json NEW.json  # prints ratios; exit status 1 where NEW is worse

Costs are described, no device is touched, and nothing is measured but the processor time of planning: all
other figures repeat exactly. To compare two versions of Stretto run this file with each of them
(`PYTHONPATH=.../src`); it uses names that they share. One job needs `diffusers`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_loss, next_token_sum
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum

STEP_LIMIT = 1.01
"""A step may take this many times as long as before: half of the 2 % by which costs are off."""
MEAN_STEP_LIMIT = 1.003
"""All steps may take this many times as long as before in their mean."""
PLANNING_LIMIT = 1.2
"""Planning may take this many times as long as before: each job, and all together."""
PLANNING_FLOOR_S = 0.3
"""A job that is planned faster counts as if it took this long: what is below is mostly noise. The sum over
all jobs has no such floor."""
BOUND_TOLERANCE = 1e-9
"""Share by which a bound may be lower, for sums of floats in another order."""
REPEATED_BELOW_S = 2.0
"""Planning that takes less is timed three times or more, of which the median counts."""

Figures = dict[str, Any]
"""Of one job, or of a file: `measure` and `run` say which."""

CORES = {"peak_tflops": 0.085, "memory_gbps": 10.0, "op_overhead_us": 3.0}
"""A core of a server processor, as in `examples/overlap_picture.py`."""

CORE_LINKS = {
    "cores 100mbit": {"latency_us": 300.0, "link_gbps": 0.0125},
    "cores 1gbit": {"latency_us": 100.0, "link_gbps": 0.125},
    "cores busy link": {"latency_us": 100.0, "link_gbps": 0.125, "processor_us_per_mb": 1000.0},
}
"""Cluster -> what joins its cores. The last one's transfers need a core as well."""

PAIRS = 'device = "h100"\ncount = 16\nnode_devices = 2\n[figures]\nnic_gbit = {}\n'
CLUSTER_FILES = {"h100 pairs 25gbit": PAIRS.format(25), "h100 pairs 200gbit": PAIRS.format(200)}
"""Cluster -> its file: pairs of accelerators, joined by cards so slow that messages between stages (25) or
gradient reductions (200) take about as long as the compute beside them."""

CSVS = {
    "virtual": (
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3\n"
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3\n"
    ),
    "overlapped": (
        "0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,0B2,0B3\n"
        "1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,(1F3;1B2)OVERLAP_F_B,1B3\n"
    ),
}
"""Schedules in PyTorch's format: two stages a rank, interleaved; and slots that overlap by themselves."""


@dataclass(frozen=True)
class GridJob:
    """One job of the grid. On a cluster of cores it computes in float32, else in bfloat16 for "cuda".

    parallel: arguments of `stretto.Parallel`; a `schedule` of `CSVS` is one by its name.
    model: fields of the model's configuration that differ from `SHAPE`; `rows` is the batch of the step.
    """

    name: str
    cluster: str
    parallel: Mapping[str, Any]
    rows: int = 8
    model: Mapping[str, Any] = field(default_factory=dict)
    counts: bool = False
    """Whether the loss is a sum and a count."""
    kind: Literal["gpt", "llama", "experts", "unet"] = "gpt"
    """Stretto's GPT; a Llama of `transformers` with heads of keys that queries share; Stretto's GPT with
    experts (`model` then has all fields of `MoEConfig`); the U-Net of `diffusers`."""
    stages: int | None = None

    @property
    def on_cores(self) -> bool:
        return self.cluster.startswith("cores")


SHAPE = {"vocab_size": 4096, "layers": 4, "hidden": 512, "heads": 8, "context": 256}
SHORT, TIED, LEARNED = {"layers": 2}, {"tie_embeddings": True}, {"layers": 8, "positions": "learned"}
LARGE = {"hidden": 4096, "heads": 32, "context": 2048, "vocab_size": 32000}
"""For an accelerator; tensors have shapes only, so that size costs nothing here."""

LIMIT = 64 * 2**20
"""Memory limit of a rank, in bytes, in the job that is planned by a limit. Without one its peak is 70 MiB;
with this one a little is computed again, and windows of pairs need too much."""

DEEPSEEK = {"vocab_size": 102400, "layers": 2, "hidden": 2048, "heads": 16, "context": 4096, "experts": 64}
DEEPSEEK |= {"top_k": 6, "expert_ratio": 1408 / 2048, "capacity_factor": 1.0, "shared_experts": 2}
"""Two layers with the shapes of DeepSeek-V2-Lite (arXiv 2405.04434)."""
SMALL_EXPERTS = SHAPE | {"layers": 2, "experts": 8, "top_k": 2, "capacity_factor": 1.25}
LLAMA_70B = {"layers": 80, "hidden": 8192, "heads": 64, "context": 4096, "vocab_size": 32000}
LLAMA_70B |= {"intermediate": 28672, "key_heads": 8}
"""Llama 2 of 70 billion parameters (arXiv 2307.09288)."""
GPT3_175B = {"layers": 96, "hidden": 12288, "heads": 96, "context": 2048, "vocab_size": 51200}
GPT3_175B |= {"positions": "learned"}
"""`examples/gpt3_175b.toml`."""
MOE: Mapping[str, Any] = {"rows": 64, "kind": "experts", "model": DEEPSEEK}
EIGHT = {"layers": 8}
UNET_CHANNELS = 320
"""Of the first of four levels: the smallest of Alpa's U-Nets, `examples/unet_large.toml`."""


def _job(name: str, cluster: str, schedule: str = "1f1b", **given: Any) -> GridJob:
    """given: fields of `GridJob`, and beside them arguments of `stretto.Parallel`."""
    own = {key: given.pop(key) for key in ("rows", "model", "counts", "kind", "stages") if key in given}
    return GridJob(name, cluster, {"schedule": schedule, **given}, **own)


JOBS = (
    # Pipelines: every family, few and many microbatches, schedules of your own.
    _job("pp2 gpipe", "cores 100mbit", "gpipe", pp=2, microbatches=8),
    _job("pp4 1f1b", "cores 100mbit", pp=4, microbatches=8, model={"layers": 8}),
    _job("pp4 eager-1f1b", "cores 100mbit", "eager-1f1b", pp=4, microbatches=8, model=LEARNED),
    _job("pp4 zb-h1", "h100 pairs 25gbit", "zb-h1", pp=4, microbatches=8, model=LARGE),
    _job("pp2 zb-h2 32 microbatches", "cores 1gbit", "zb-h2", pp=2, microbatches=32, rows=32),
    _job("pp2 zb-h2 off, max_live", "cores 1gbit", "zb-h2", pp=2, microbatches=8, overlap="off", max_live=2),
    _job("pp2 virtual stages, tied", "cores 1gbit", "virtual", pp=2, microbatches=4, model=TIED, stages=4),
    _job("pp2 tp2 overlapped slots", "cores 1gbit", "overlapped", pp=2, tp=2, microbatches=4),
    # Tensor parallelism: windows of one microbatch, pairs, full steps, products and messages in parts.
    _job("tp2 local", "cores 1gbit", tp=2, microbatches=2, overlap="local"),
    _job("tp2 window", "cores 1gbit", tp=2, microbatches=4, model=SHORT),
    _job("tp2 sp, counts", "cores busy link", tp=2, sequence_parallel=True, microbatches=4, counts=True),
    _job(
        "tp4 sp llama",
        "h100x8",
        tp=4,
        sequence_parallel=True,
        microbatches=4,
        model=LARGE | SHORT,
        kind="llama",
    ),
    _job("tp2 split_ops", "cores 1gbit", tp=2, split_ops=True, model=SHORT),
    _job(
        "pp2 tp2 eager-1f1b", "cores 1gbit", "eager-1f1b", pp=2, tp=2, microbatches=4, model={"hidden": 256}
    ),
    _job("pp2 tp2 parts", "h100 pairs 25gbit", "zb-h1", pp=2, tp=2, microbatches=4, model=LARGE | SHORT),
    _job("pp4 tp2 local", "h100 pairs 25gbit", pp=4, tp=2, microbatches=8, overlap="local", model=LARGE),
    # What the backward computes again.
    _job("pp2 full", "cores 1gbit", pp=2, microbatches=8, recompute="full", model={"dropout": 0.1}),
    _job(
        "pp2 tp2 selective",
        "h100 pairs 25gbit",
        pp=2,
        tp=2,
        microbatches=16,
        recompute="selective",
        rows=16,
        model=LARGE | SHORT,
    ),
    _job("tp2 sp gathers", "cores 1gbit", tp=2, sequence_parallel=True, microbatches=2, recompute="gathers"),
    _job(
        "pp2 tp2 sp limit",
        "cores 1gbit",
        "eager-1f1b",
        pp=2,
        tp=2,
        sequence_parallel=True,
        microbatches=16,
        recompute=LIMIT,
        rows=16,
        model=SHORT,
    ),
    # Gradient reductions, of which some take as long as the backward.
    _job("dp2 8 layers", "cores 1gbit", dp=2, rows=6, model={"layers": 8}),
    _job("dp4 pp2 zb-h1 tied", "cores 1gbit", "zb-h1", dp=4, pp=2, microbatches=4, rows=16, model=TIED),
    _job(
        "dp4 tp2 sp tied",
        "h100 pairs 200gbit",
        dp=4,
        tp=2,
        sequence_parallel=True,
        microbatches=2,
        rows=64,
        model=LARGE | TIED,
    ),
    _job(
        "dp2 pp2 tp2 llama",
        "h100 pairs 200gbit",
        "eager-1f1b",
        dp=2,
        pp=2,
        tp=2,
        microbatches=4,
        rows=32,
        model=LARGE | SHORT,
        kind="llama",
    ),
    # Experts: windows, chunks of the sequence, slices of the capacity; chunks of dense blocks.
    _job("ep16 windows", "h100x16", ep=16, dp=16, microbatches=4, overlap="window", **MOE),
    _job("ep16 ampipe auto", "h100x16", ep=16, dp=16, microbatches=4, ampipe_degree="auto", **MOE),
    _job(
        "ep16 ampipe 2, pipe-experts",
        "h100x16",
        ep=16,
        dp=16,
        microbatches=4,
        ampipe_degree=2,
        pipe_experts_multi_data=2,
        overlap="local",
        **MOE,
    ),
    _job(
        "pp2 ep2 experts",
        "cores 1gbit",
        pp=2,
        ep=2,
        dp=2,
        microbatches=4,
        rows=16,
        kind="experts",
        model=SMALL_EXPERTS,
    ),
    _job("tp8 ampipe 2", "h100x8", tp=8, ampipe_degree=2, overlap="local", rows=2, model=LARGE),
    # A U-Net whose skips cross stages.
    _job(
        "pp2 unet",
        "h100x2",
        "eager-1f1b",
        pp=2,
        microbatches=16,
        rows=1024,
        kind="unet",
        split=["up_blocks.1.resnets.1"],
    ),
    # Several stages a rank; the family that planning chooses.
    _job("pp4 zb-v", "h100 pairs 25gbit", "zb-v", pp=4, microbatches=8, model=LARGE | {"layers": 8}),
    _job(
        "pp4 tp2 dualpipev", "h100 pairs 25gbit", "dualpipev", pp=4, tp=2, microbatches=8, model=LARGE | EIGHT
    ),
    _job("pp4 auto", "cores 100mbit", "auto", pp=4, microbatches=8, model=EIGHT),
    _job("pp2 tp2 auto", "cores 1gbit", "auto", pp=2, tp=2, microbatches=8),
    # Large models, planned from their shapes.
    _job(
        "70B pp8 tp8 dp8",
        "h100x512",
        pp=8,
        tp=8,
        dp=8,
        sequence_parallel=True,
        microbatches=32,
        rows=256,
        kind="llama",
        model=LLAMA_70B,
    ),
    _job(
        "175B pp16 tp8 dp8",
        "h100x1024",
        pp=16,
        tp=8,
        dp=8,
        sequence_parallel=True,
        microbatches=192,
        rows=1536,
        model=GPT3_175B,
    ),
)


def capture(job: GridJob, folder: Path) -> stretto.Job:
    """The captured job. folder: where its schedule is written, if it has one of its own."""
    shape = SHAPE | job.model
    parallel = dict(job.parallel)
    if parallel["schedule"] in CSVS:
        path = folder / f"{parallel['schedule']}.csv"
        path.write_text(CSVS[parallel["schedule"]])
        parallel["schedule"] = str(path)
    model, batch, loss = _KINDS[job.kind](job, shape)
    return stretto.capture(
        model,
        batch,
        loss=loss,
        parallel=stretto.Parallel(**parallel),
        precision="float32" if job.on_cores else "bf16",
        device="cpu" if job.on_cores else "cuda",
        stages=job.stages,
    )


Built = tuple[torch.nn.Module, Any, Callable[..., Any]]
"""A model on the meta device, a batch of all rows, and the loss."""


def _gpt(job: GridJob, shape: Mapping[str, Any]) -> Built:
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    return model, _tokens(job, shape), next_token_sum if job.counts else next_token_loss


def _experts(job: GridJob, shape: Mapping[str, Any]) -> Built:
    with torch.device("meta"):
        model = MoEGPT(MoEConfig(**job.model))
    return model, _tokens(job, job.model), moe_token_sum


def _unet(job: GridJob, shape: Mapping[str, Any]) -> Built:
    from examples.unet_large import large

    with torch.device("meta"):
        task = large(seed=0, channels=UNET_CHANNELS)
        model = task.model()
    return model, task.train(0, job.rows), task.loss


def _tokens(job: GridJob, shape: Mapping[str, Any]) -> torch.Tensor:
    return torch.zeros(job.rows, shape["context"] + 1, dtype=torch.int64)


def _llama(job: GridJob, shape: Mapping[str, Any]) -> Built:
    from transformers import LlamaForCausalLM  # the import takes seconds, and few jobs need it

    tokens = _tokens(job, shape)[:, 1:]
    with torch.device("meta"):
        model = LlamaForCausalLM(_llama_config(shape))
    return model, {"input_ids": tokens, "labels": tokens}, _own_loss


def _llama_config(shape: Mapping[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden"],
        intermediate_size=shape.get("intermediate", shape["hidden"] * 5 // 2),
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape.get("key_heads", shape["heads"] // 4),
        max_position_embeddings=shape["context"] + 1,
        use_cache=False,
    )


_KINDS: Mapping[str, Callable[[GridJob, Mapping[str, Any]], Built]] = {
    "gpt": _gpt,
    "llama": _llama,
    "experts": _experts,
    "unet": _unet,
}


def _own_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def cluster_of(job: GridJob, folder: Path) -> Any:
    """What `stretto.plan` takes as its cluster. folder: where cluster files are written."""
    if job.on_cores:
        return stretto.Cluster(**CORES, **CORE_LINKS[job.cluster])
    if job.cluster in CLUSTER_FILES:
        path = folder / f"{job.cluster.replace(' ', '_')}.toml"
        path.write_text(CLUSTER_FILES[job.cluster])
        return str(path)
    return job.cluster


def measure(job: GridJob, rounds: int = 1) -> Figures:
    """What the plan of a job promises, and the processor time that planning takes, without the capture: the
    median of so many rounds, and of three where it takes little.

    Exposed communication is the mean over ranks, in all and by axis; memory is that of the rank with most.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        captured, cluster = capture(job, folder), cluster_of(job, folder)
        taken_s: list[float] = []
        while len(taken_s) < rounds or (len(taken_s) < 3 and taken_s[0] < REPEATED_BELOW_S):
            gc.collect()
            begin_s = time.process_time()
            plan = stretto.plan(captured, cluster=cluster)
            taken_s.append(time.process_time() - begin_s)
    result = plan.prediction
    assert result is not None
    return {
        "step_us": result.step_us,
        "exposed_us": statistics.fmean(result.exposed_us),
        "exposed_axis_us": {axis: statistics.fmean(us) for axis, us in result.exposed_axis_us.items()},
        "peak_bytes": max(result.peak_bytes),
        "bound_us": result.bound_us,
        "overlap": plan.overlap,
        "planning_s": round(statistics.median(taken_s), 3),
    }


def run(jobs: Sequence[GridJob], rounds: int, say: Callable[[str], None] = print) -> Figures:
    """{"torch": its version, "rounds": as given, "jobs": {name: what `measure` gives}}."""
    say(
        _line("job", "step ms", "bound ms", "exposed ms", "peak MiB", "planning s")
        + "  exposed ms by axis; overlap"
    )
    result: dict[str, Figures] = {}
    for job in jobs:
        one = result[job.name] = measure(job, rounds)
        times = [f"{one[key] / 1000:.3f}" for key in ("step_us", "bound_us", "exposed_us")]
        axes = ", ".join(f"{axis} {us / 1000:.3f}" for axis, us in one["exposed_axis_us"].items() if us)
        peak = f"{one['peak_bytes'] / 2**20:.1f}"
        line = _line(job.name, *times, peak, f"{one['planning_s']:.2f}")
        say(f"{line}  {axes or '-'}; {one['overlap']}")
    say(f"planned in {sum(one['planning_s'] for one in result.values()):.1f} s of processor time")
    return {"torch": torch.__version__, "rounds": rounds, "jobs": result}


def compare(old: Figures, new: Figures, say: Callable[[str], None] = print) -> list[str]:
    """Prints new over old of every job, and returns what is worse than it may be, in words.

    Exposed communication and memory are shown, not judged.
    """
    before, after = old["jobs"], new["jobs"]
    faults = [f"{name}: is in one of the files only" for name in before.keys() ^ after.keys()]
    faults.sort()
    say("new / old")
    say(_line("job", "step", "bound", "exposed", "peak", "planning"))
    names = [name for name in before if name in after]
    for name in names:
        was, now = before[name], after[name]
        keys = ("step_us", "bound_us", "exposed_us", "peak_bytes", "planning_s")
        ratios = {key: _ratio(was[key], now[key]) for key in keys}
        say(_line(name, *(f"{ratio:.4f}" for ratio in ratios.values())))
        if now["step_us"] > STEP_LIMIT * was["step_us"]:
            faults.append(f"{name}: its step takes {ratios['step_us']:.4f} times as long")
        if now["bound_us"] < (1.0 - BOUND_TOLERANCE) * was["bound_us"]:
            faults.append(f"{name}: its bound is lower, {ratios['bound_us']:.9f} of what it was")
        if max(now["planning_s"], PLANNING_FLOOR_S) > PLANNING_LIMIT * max(
            was["planning_s"], PLANNING_FLOOR_S
        ):
            faults.append(
                f"{name}: planning takes {now['planning_s']:.2f} s, and took {was['planning_s']:.2f} s"
            )
    mean = statistics.fmean(_ratio(before[name]["step_us"], after[name]["step_us"]) for name in names)
    say(f"steps in the mean: {mean:.5f}")
    if mean > MEAN_STEP_LIMIT:
        faults.append(f"all jobs: steps take {mean:.5f} times as long in the mean")
    sums_s = [sum(jobs[name]["planning_s"] for name in names) for jobs in (before, after)]
    say(f"all of planning: {sums_s[1]:.1f} s, and took {sums_s[0]:.1f} s ({_ratio(*sums_s):.3f})")
    if sums_s[1] > PLANNING_LIMIT * sums_s[0]:
        faults.append(f"all jobs: planning takes {_ratio(*sums_s):.2f} times as long")
    return faults


def _ratio(was: float, now: float) -> float:
    if was:
        return now / was
    return float("inf") if now else 1.0


def _line(name: str, *cells: str) -> str:
    return f"{name:<34}" + "".join(f"{cell:>12}" for cell in cells)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE.json", help="plan the jobs and write their figures")
    what.add_argument(
        "--compare", type=Path, nargs=2, metavar=("OLD.json", "NEW.json"), help="judge two such files"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="time slow planning N times too")
    parser.add_argument("--only", default="", metavar="TEXT", help="plan jobs whose name has this in it")
    given = parser.parse_args(arguments)
    if given.compare:
        faults = compare(*(json.loads(path.read_text()) for path in given.compare))
        print("\n".join(("", *faults)) if faults else "\nnothing is worse")
        return 1 if faults else 0
    torch.set_num_threads(1)
    result = run([job for job in JOBS if given.only in job.name], given.rounds)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

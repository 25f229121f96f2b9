"""The end of a run, on rank 0: what came out, in words, tables and files."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stretto.config import TrainSettings
from stretto.ir.metrics import ObservedRun
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.report.load import load_grid
from stretto.report.stalls import stalls_grid
from stretto.report.tables import comparison_grid
from stretto.runtime.shards import whole_spec
from stretto.train.data import TextData
from stretto.train.progress import duration
from stretto.train.run_files import REPORT, TRACE, end_run
from stretto.train.whole import SAMPLE_PROMPT_TOKENS, load_whole, write_sample

LARGEST_SAMPLED_BYTES = 2 * 1000**3
"""A model above this is not built on one rank just to write a sample: it may not fit beside the stages."""


@dataclass(frozen=True, slots=True)
class Results:
    """What a run came to. losses, step_s: of the steps done by this process; held_out_loss: nats a token;
    timelines: of the last steps, as traced; seen: what the model lets see, if anything."""

    settings: TrainSettings
    plan: Plan
    data: TextData
    steps: int
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    held_out_loss: float
    timelines: tuple[Timeline, ...]
    seen: ObservedRun | None
    checkpoint: Path | None
    seconds: float

    @property
    def measured(self) -> Timeline | None:
        """The traced step of median length."""
        ordered = sorted(self.timelines, key=lambda t: t.step_us)
        return ordered[len(ordered) // 2] if ordered else None


def finish(results: Results, say: Callable[[str], None]) -> None:
    """Say how it went, write a sample, and leave summary and report in the run's folder."""
    run_dir = results.settings.run_dir
    entropy = results.data.unigram_entropy_nats
    say("")
    say(
        f"held-out loss {results.held_out_loss:.4f} nats a token after step {results.steps}; "
        f"token frequencies alone give {entropy:.4f}"
    )
    sample = _sample(results, say)
    measured, prediction = results.measured, results.plan.prediction
    if measured is not None and prediction is not None:
        say("")
        Console().print(comparison_grid(prediction, measured).rich())
    _print_seen(results)
    end_run(run_dir, measured, results.seen, _summary(results, sample))
    say("")
    told = [("report", run_dir / REPORT)]
    if measured is not None:
        told.append(("trace", run_dir / TRACE))
    told += [("plan", run_dir / "plan.json"), ("metrics", run_dir / "metrics.jsonl")]
    if results.checkpoint is not None:
        told.append(("checkpoint", results.checkpoint))
    for what, path in told:
        note = " (open it at https://ui.perfetto.dev)" if what == "trace" else ""
        say(f"{what:<11}{path}{note}")
    say(f"done in {duration(results.seconds)}")


def _print_seen(results: Results) -> None:
    """Who waits for whom and why, where the model has experts."""
    loads = None if results.seen is None else load_grid(results.seen)
    if results.seen is None or loads is None:
        return
    measured = results.measured
    stalls = None if measured is None else stalls_grid(measured, results.plan, results.seen.end)
    for grid in (loads, stalls):
        if grid is not None:
            grid.print()


def _sample(results: Results, say: Callable[[str], None]) -> str | None:
    training = results.settings.training
    if training.sample_tokens == 0 or results.checkpoint is None:
        return None
    job = results.plan.job
    size_bytes = sum(whole_spec(job, p).numel * 4 for p in job.parameters if p.name == p.tied_to)
    if size_bytes > LARGEST_SAMPLED_BYTES:
        say(
            f"no sample: the model has {size_bytes / 1e9:.1f} GB of weights, and above "
            f"{LARGEST_SAMPLED_BYTES / 1e9:.0f} GB it is not put together on one rank; see `stretto export`"
        )
        return None
    model, settings = load_whole(results.checkpoint)
    # int64 because tokens are stored in the smallest type that holds them.
    prompt = torch.from_numpy(results.data.held_out.tokens[:SAMPLE_PROMPT_TOKENS].astype("int64"))
    before, after = write_sample(
        model,
        results.data.tokenizer,
        prompt,
        training.sample_tokens,
        settings.data.sequence_length,
        training.seed,
    )
    say("")
    say(f"a sample, continuing held-out text {before!r}:")
    for line in after.splitlines():
        say(f"  | {line}")
    return after


def _summary(results: Results, sample: str | None) -> dict[str, Any]:
    training, length = results.settings.training, results.settings.data.sequence_length
    prediction, measured = results.plan.prediction, results.measured
    found: dict[str, Any] = {
        "steps": results.steps,
        "held_out_loss": results.held_out_loss,
        "unigram_entropy": results.data.unigram_entropy_nats,
        "seconds": results.seconds,
    }
    if results.losses:
        found["loss"] = results.losses[-1]
        found["step_s"] = statistics.median(results.step_s)
        found["tokens_per_s"] = training.global_batch * length / found["step_s"]
    if prediction is not None:
        found["predicted_step_us"] = prediction.step_us
    if measured is not None:
        found["measured_step_us"] = measured.step_us
        found["measured_exposed_us"] = measured.exposed_us
    if sample is not None:
        found["sample"] = sample
    return found

"""The flags of training: steps, rates, the optimizer, precision, evaluation and saving."""

from __future__ import annotations

import math

from stretto.convert.arguments import Tally

WARMUP = ("--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples")
WSD = ("--lr-wsd-decay-style", "--lr-wsd-decay-iters")
DECAY = ("--lr-decay-iters", "--lr-decay-samples")


def put_training(tally: Tally) -> None:
    """All of the tree but `[model]` and `[parallel]`."""
    if tally.get("--bf16") or tally.get("--fp16"):
        tally.put("precision", "bf16", "--bf16", why='--fp16, in place of which Stretto has "bf16"')
    tally.lack('precision = "bf16" takes its place, which needs no scaled loss', "--fp16")
    tally.need("--seq-length")
    _put_rates(tally, _put_steps(tally))
    _put_optimizer(tally)
    _put_evaluation(tally)
    _put_saving(tally)


def _put_optimizer(tally: Tally) -> None:
    kind = tally.get("--optimizer")
    if kind == "sgd":
        tally.put("optimizer.name", "SGD", "--optimizer")
        tally.put("optimizer.options.momentum", tally.get("--sgd-momentum"), "--sgd-momentum")
        tally.lack("SGD has no such number", "--adam-beta1", "--adam-beta2", "--adam-eps")
        return
    if kind != "adam":
        tally.refuse("--optimizer", "Megatron's Muon is none of torch.optim; append --optimizer adam, or sgd")
    betas = [tally.get("--adam-beta1"), tally.get("--adam-beta2")]
    tally.put("optimizer.betas", betas, "--adam-beta1", "--adam-beta2")
    tally.put("optimizer.eps", tally.get("--adam-eps"), "--adam-eps")


def _put_steps(tally: Tally) -> int:
    if tally.get("--train-iters") is None and tally.is_given("--train-samples"):
        batch: int = tally.values.get("training.global_batch", 1)
        steps = tally.need("--train-samples") // batch
        tally.put("training.steps", steps, "--train-samples")
        return max(steps, 1)
    steps = tally.need("--train-iters")
    tally.put("training.steps", steps, "--train-iters")
    return steps


def _put_rates(tally: Tally, steps: int) -> None:
    peak, least, style = tally.get("--lr"), tally.get("--min-lr"), tally.get("--lr-decay-style")
    if peak is None:
        tally.refused.append("--lr is missing; append --lr and the highest rate")
        return
    if style == "WSD":
        if tally.get(WSD[0]) != "linear":
            tally.refuse(WSD[0], f"Stretto's rates decay on a line; append {WSD[0]} linear")
        tally.put("lr_schedule.decay_steps", tally.need(WSD[1]), WSD[1])
    elif style not in ("constant", "linear", "cosine"):
        tally.refuse(
            "--lr-decay-style",
            "Stretto's rates are constant, linear, cosine or WSD; append --lr-decay-style cosine",
        )
        return
    tally.put("lr_schedule.kind", style.lower(), "--lr-decay-style")
    if style != "constant" and peak > 0:
        tally.put("lr_schedule.min_lr_ratio", least / peak, "--min-lr", "--lr")
    batch = tally.values.get("training.global_batch", 1)
    decay, samples = tally.get("--lr-decay-iters"), tally.get("--lr-decay-samples")
    over = decay if decay is not None else samples // batch if samples is not None else steps
    _put_warmup(tally, over, batch)
    if style != "constant" and over != steps:
        tally.lack(f"the rate decays over all {steps} steps, not over {over}", *DECAY)


def _put_warmup(tally: Tally, over: int, batch: int) -> None:
    fraction, steps, samples = (tally.get(name) for name in WARMUP)
    if fraction is not None:
        if not 0 <= fraction <= 1:
            tally.refuse(WARMUP[0], "expected a number from 0 to 1")
            return
        tally.put("lr_schedule.warmup_steps", round(fraction * over), WARMUP[0])
    elif tally.is_given(WARMUP[2]) and samples:
        tally.put("lr_schedule.warmup_steps", math.ceil(samples / batch), WARMUP[2])
    else:
        tally.put("lr_schedule.warmup_steps", steps, WARMUP[1])


def _put_evaluation(tally: Tally) -> None:
    batches = tally.get("--eval-iters")
    if batches == 0:
        tally.put("training.eval_every", 0, "--eval-iters")
        tally.also("--eval-iters", "the held-out text is still measured after the last step")
    else:
        tally.put("training.eval_batches", batches, "--eval-iters")
        tally.put("training.eval_every", tally.get("--eval-interval"), "--eval-interval")
    _put_split(tally)


def _put_split(tally: Tally) -> None:
    text = tally.get("--split")
    if text is None:
        return
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < sum(parts) < math.inf:
        tally.refuse("--split", "expected up to three shares, such as 969,30,1")
    elif sum(parts[1:]) == 0:
        tally.lack("some text is always held out: data.held_out_fraction keeps its default", "--split")
    else:
        tally.put("data.held_out_fraction", sum(parts[1:]) / sum(parts), "--split")


def _put_saving(tally: Tally) -> None:
    saved, loaded = tally.get("--save"), tally.get("--load")
    if loaded is not None and loaded != saved:
        tally.lack("Megatron's checkpoints are not read: the run starts with fresh weights", "--load")
    if tally.is_given("--tensorboard-dir"):
        tally.put("output.tensorboard", True, "--tensorboard-dir")
        tally.also("--tensorboard-dir", "its events are in the run's folder")

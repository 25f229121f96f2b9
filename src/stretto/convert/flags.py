"""The table of flags: what a row is, and the rows of flags that become settings.

A flag is

  taken        it becomes settings: those of `keys`, or what `model`, `layout` and `training` make of it
  not needed   the settings do without it, and nothing is lost
  lacking      Stretto has no such thing; the settings are written without it, `why` says what happens then
  refused      without it another model or another job would be trained, so nothing is written

Names, arities and defaults are those of Megatron-LM's megatron/training/arguments.py and of MindSpeed's
mindspeed/arguments.py and features_manager. `flags_untaken` has the rows of the other three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fate = Literal["taken", "not needed", "lacking", "refused"]
Takes = Literal["nothing", "int", "float", "text", "many"] | tuple[str, ...]
"""What follows a flag: nothing, a value (a tuple: one of these words), or as many words as there are."""
Value = bool | int | float | str | list[str] | None


@dataclass(frozen=True, slots=True)
class Flag:
    """A row. default: the value without the flag. needs: it does nothing without that flag. idle: the
    value with which it does nothing."""

    name: str
    takes: Takes
    fate: Fate
    why: str = ""
    keys: tuple[str, ...] = ()
    default: Value = None
    needs: str = ""
    idle: str | None = None


def taken(name: str, takes: Takes, *keys: str, default: Value = None, needs: str = "") -> Flag:
    """A row of a flag that becomes settings."""
    return Flag(name, takes, "taken", "", keys, default, needs)


SHORT: dict[str, Takes] = {"": "nothing", "i": "int", "f": "float", "t": "text", "m": "many"}


def rows_of(fate: Fate, text: str) -> tuple[Flag, ...]:
    """Rows of a text: a reason, and below it, indented, the flags that share it (`flags_untaken`)."""
    rows = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.splitlines()
        why = " ".join(line for line in lines if not line.startswith(" "))
        needs = ""
        if why.startswith("needs "):
            needs, why = why.removeprefix("needs ").split(": ", 1)
        for one in " ".join(line for line in lines if line.startswith(" ")).split():
            name, _, rest = one.partition(":")
            letter, _, idle = rest.partition("=")
            rows.append(Flag(f"--{name}", SHORT[letter], fate, why, needs=needs, idle=idle or None))
    return tuple(rows)


E, RG, GQA, PIPE = "--num-experts", "--recompute-granularity", "--group-query-attention", "--use-pipe-experts"

MODEL = (
    taken("--num-layers", "int"),
    taken("--hidden-size", "int"),
    taken("--num-attention-heads", "int"),
    taken(GQA, "nothing", default=False),
    taken("--num-query-groups", "int", default=1, needs=GQA),
    taken("--kv-channels", "int"),
    taken("--ffn-hidden-size", "int"),
    taken("--max-position-embeddings", "int"),
    taken(
        "--position-embedding-type",
        ("learned_absolute", "rope", "mrope", "relative", "none"),
        default="learned_absolute",
    ),
    taken("--use-rotary-position-embeddings", "nothing", default=False),
    taken("--no-position-embedding", "nothing", default=False),
    taken("--rotary-base", "float", default=10000.0),
    taken("--normalization", ("LayerNorm", "RMSNorm"), default="LayerNorm"),
    taken("--norm-epsilon", "float", default=1e-5),
    taken("--swiglu", "nothing", default=False),
    taken("--disable-bias-linear", "nothing", default=False),
    taken("--add-qkv-bias", "nothing", default=False),
    taken("--qk-layernorm", "nothing", default=False),
    taken("--untie-embeddings-and-output-weights", "nothing", default=False),
    taken("--attention-dropout", "float", default=0.1),
    taken("--hidden-dropout", "float", default=0.1),
    taken("--init-method-std", "float", default=0.02),
    taken("--vocab-size", "int"),
    taken("--padded-vocab-size", "int"),
    taken("--make-vocab-size-divisible-by", "int", default=128),
)
EXPERTS = (
    taken(E, "int"),
    taken("--moe-router-topk", "int", default=2, needs=E),
    taken("--moe-ffn-hidden-size", "int", needs=E),
    taken("--moe-shared-expert-intermediate-size", "int", needs=E),
    taken("--n-shared-experts", "int", needs=E),
    taken("--moe-layer-freq", "text", default="1", needs=E),
    taken("--expert-interval", "int", default=1, needs=E),
    taken("--moe-expert-capacity-factor", "float", needs=E),
    taken("--moe-model-type", ("megatron_moe", "deepspeed_moe"), default="megatron_moe", needs=E),
    taken("--moe-train-capacity-factor", "float", default=1.0, needs=E),
    taken("--moe-no-drop", "nothing", default=False, needs=E),
    taken("--moe-aux-loss-coeff", "many", default=["0.0"], needs=E),
    taken("--moe-router-load-balancing-type", "many", default=["aux_loss"], needs=E),
    taken("--moe-z-loss-coeff", "float", default=0.0, needs=E),
    taken("--expert-model-parallel-size", "int", default=1, needs=E),
    taken("--expert-tensor-parallel-size", "int", needs=E),
    taken(PIPE, "nothing", default=False, needs=E),
    taken("--pipe-experts-multi-data", "int", default=1, needs=PIPE),
)
LAYOUT = (
    taken("--tensor-model-parallel-size", "int", "parallel.tp", default=1),
    taken("--pipeline-model-parallel-size", "int", "parallel.pp", default=1),
    taken("--sequence-parallel", "nothing", default=False),
    taken("--ampipe-degree", "int", default=1),
    taken("--use-nanopipe", "nothing", default=False),
    taken("--schedules-method", ("dualpipev",)),
    taken("--num-layers-per-virtual-pipeline-stage", "int"),
    taken("--num-virtual-stages-per-pipeline-rank", "int"),
    taken("--microbatch-group-size-per-virtual-pipeline-stage", "int"),
    taken("--pipeline-model-parallel-layout", "text"),
    taken("--decoder-first-pipeline-num-layers", "int"),
    taken("--decoder-last-pipeline-num-layers", "int"),
    taken("--account-for-embedding-in-pipeline-split", "nothing", default=False),
    taken("--account-for-loss-in-pipeline-split", "nothing", default=False),
    taken("--standalone-embedding-stage", "nothing", default=False),
    taken("--num-layer-list", "text"),
    taken("--noop-layers", "text"),
    taken("--tp-comm-overlap", "nothing", default=False),
    taken("--use-ascend-mc2", "nothing", default=False),
    taken("--use-ascend-coc", "nothing", default=False),
    taken("--recompute-activations", "nothing", default=False),
    taken(RG, ("full", "selective")),
    taken("--recompute-method", ("uniform", "block"), needs=RG),
    taken("--recompute-num-layers", "int", needs=RG),
    taken("--recompute-activation-function", "nothing", default=False),
    taken("--recompute-norm", "nothing", default=False),
    taken("--moe-layer-recompute", "nothing", default=False, needs=E),
)
TRAINING = (
    taken("--micro-batch-size", "int"),
    taken("--global-batch-size", "int"),
    taken("--train-iters", "int"),
    taken("--train-samples", "int"),
    taken("--seq-length", "int", "data.sequence_length"),
    taken("--split", "text"),
    taken("--seed", "int", "training.seed", "data.seed", default=1234),
    taken("--optimizer", ("adam", "sgd", "muon", "dist_muon"), default="adam"),
    taken("--lr", "float", "optimizer.lr"),
    taken("--min-lr", "float", default=0.0),
    taken(
        "--lr-decay-style", ("constant", "linear", "cosine", "inverse-square-root", "WSD"), default="linear"
    ),
    taken("--lr-decay-iters", "int"),
    taken("--lr-decay-samples", "int"),
    taken("--lr-warmup-iters", "int", default=0),
    taken("--lr-warmup-samples", "int", default=0),
    taken("--lr-warmup-fraction", "float"),
    taken("--adam-beta1", "float", default=0.9),
    taken("--adam-beta2", "float", default=0.999),
    taken("--adam-eps", "float", "optimizer.eps", default=1e-8),
    taken("--weight-decay", "float", "optimizer.weight_decay", default=0.01),
    taken("--clip-grad", "float", "optimizer.grad_clip_norm", default=1.0),
    taken("--bf16", "nothing", default=False),
    taken("--fp16", "nothing", default=False),
    taken("--eval-interval", "int", default=1000),
    taken("--eval-iters", "int", default=100),
    taken("--log-interval", "int", "training.log_every", default=100),
    taken("--save", "text"),
    taken("--load", "text"),
    taken("--save-interval", "int"),
    taken("--tensorboard-dir", "text"),
)

"""The flags of a mixture of experts: which blocks have them, how many and how wide, what balances them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.convert.arguments import Tally, append

MOST_LAYERS = 10_000
CAPACITY = (
    "--moe-expert-capacity-factor",
    "--moe-train-capacity-factor",
    "--moe-no-drop",
    "--moe-model-type",
)
KINDS = "--moe-router-load-balancing-type"
BEFORE = "--moe-router-pre-softmax"
SCORED = (
    "--moe-router-score-function",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate",
    "--moe-router-topk-scaling-factor",
    "--moe-router-num-groups",
    "--moe-router-group-topk",
)
SHARED = ("--moe-shared-expert-intermediate-size", "--n-shared-experts")


@dataclass(frozen=True, slots=True)
class ExpertFlags:
    """width: of an expert. plain: of a block's MLP without experts. dense: the blocks without. aux: weight of
    the balancing loss."""

    count: int
    top_k: int
    width: int
    plain: int
    layers: int
    dense: tuple[int, ...]
    aux: float


def experts_of(tally: Tally, real: Sequence[int], plain: int) -> ExpertFlags | None:
    """What the flags say; None for a model without experts. real: numbers of its blocks, as flags count."""
    if not tally.is_given("--num-experts"):
        return None
    width = tally.get("--moe-ffn-hidden-size")
    dense = _dense(tally, tally.need("--num-layers"))
    return ExpertFlags(
        tally.need("--num-experts"),
        tally.need("--moe-router-topk"),
        tally.need("--moe-ffn-hidden-size") if width is not None else plain,
        plain,
        len(real),
        tuple(at for at, number in enumerate(real) if number in dense),
        _balance(tally),
    )


def put_experts(tally: Tally, experts: ExpertFlags | None, hidden: int) -> None:
    """Their settings, for the kind of model that is written already."""
    if experts is None:
        return
    if tally.values["model.kind"] == "moe":
        _put_own(tally, experts, hidden)
    else:
        _put_transformers(tally, experts, tally.values["model.architecture"])


def _refuse_softmax_of_all(tally: Tally, name: str) -> None:
    if tally.get(BEFORE) and tally.need("--moe-router-topk") > 1:
        tally.refuse(
            BEFORE,
            f"the weights of a token's experts sum to 1 in {name}; of Qwen3-MoE they need not: append "
            "--swiglu --normalization RMSNorm --position-embedding-type rope --qk-layernorm, or take it out",
        )


def _put_own(tally: Tally, experts: ExpertFlags, hidden: int) -> None:
    if tally.get(SCORED[0]) == "softmax":
        _refuse_softmax_of_all(tally, "Stretto's mixture")
    _put_router(tally)
    tally.put("model.experts", experts.count, "--num-experts")
    tally.put("model.top_k", experts.top_k, "--moe-router-topk")
    wide = "--moe-ffn-hidden-size" if tally.is_given("--moe-ffn-hidden-size") else "--ffn-hidden-size"
    tally.put("model.expert_ratio", experts.width / hidden, wide, why="an expert is as wide as an MLP")
    capacity, flags = _capacity(tally)
    tally.put("model.capacity_factor", capacity, *flags)
    tally.put("model.aux_weight", experts.aux, "--moe-aux-loss-coeff", KINDS)
    tally.put("model.z_weight", tally.get("--moe-z-loss-coeff"), "--moe-z-loss-coeff")
    shared = _shared(tally, experts.width)
    if shared:
        tally.put("model.shared_experts", shared, *SHARED)
    placed = _placed_by(experts)
    if placed is None:
        tally.refuse(
            _placed(tally),
            "Stretto has experts in every block, or a plain MLP in the first blocks, or in "
            f"one of so many; {append('--moe-layer-freq', 1)}, or a list such as "
            f"'([0]*1+[1]*{experts.layers - 1})'",
        )
    for key, number in (placed or {}).items():
        tally.put(key, number, _placed(tally))


def _put_router(tally: Tally) -> None:
    """How experts are scored and chosen. Megatron's groups are of routers of both kinds, Stretto's of one."""
    function, bias, rate, scaling, groups, best = SCORED
    kind = tally.get(function)
    if kind not in ("softmax", "sigmoid"):
        tally.refuse(function, f"expected softmax or sigmoid; append {function} sigmoid")
    others = [name for name in (bias, groups) if tally.get(name)]
    if kind == "softmax" and others:
        tally.refuse(
            others[0], f"Stretto's is of scores by sigmoid; append {function} sigmoid, or take it out"
        )
    if kind != "sigmoid":
        tally.lack("the router has no bias", rate)
    else:
        tally.put("model.router", "sigmoid", function)
        if tally.get(bias):
            tally.put("model.bias_rate", tally.get(rate), bias, rate)
        if tally.get(groups):
            tally.put("model.groups", tally.need(groups), groups)
            tally.put("model.top_groups", tally.need(best), best)
    if tally.get(scaling) != 1:
        tally.put("model.scaling", tally.get(scaling), scaling)
    tally.lack("it changes nothing here", *SCORED)


def _refuse_scores(tally: Tally, name: str) -> None:
    for flag in SCORED:
        if tally.is_given(flag) and str(tally.get(flag)) not in ("softmax", "1.0"):
            tally.refuse(
                flag,
                f"{name} scores experts by a softmax of all: take it out, or write model.kind = "
                '"huggingface" with one that has it (DeepseekV3ForCausalLM) by hand',
            )
    tally.lack("it changes nothing here", *SCORED)


def _put_transformers(tally: Tally, experts: ExpertFlags, name: str) -> None:
    key, qwen = "model.config.", name == "Qwen3MoeForCausalLM"
    _refuse_scores(tally, name)
    width = ("--moe-ffn-hidden-size", "--ffn-hidden-size")
    tally.put(f"{key}{'num_experts' if qwen else 'num_local_experts'}", experts.count, "--num-experts")
    tally.put(f"{key}num_experts_per_tok", experts.top_k, "--moe-router-topk")
    if qwen:
        tally.put(f"{key}moe_intermediate_size", experts.width, width[0], why="as wide as an MLP")
        tally.put(f"{key}intermediate_size", experts.plain, width[1])
        # Megatron takes the softmax of the chosen scores, or with the flag, and of a single one, of all.
        several = experts.top_k > 1 and not tally.get(BEFORE)
        tally.put(
            f"{key}norm_topk_prob", several, BEFORE, why="Megatron takes the softmax of the chosen scores"
        )
        if experts.dense:
            tally.put(f"{key}mlp_only_layers", list(experts.dense), _placed(tally))
    else:
        _refuse_softmax_of_all(tally, name)
        wide = width[0] if tally.is_given(width[0]) else width[1]
        tally.put(f"{key}intermediate_size", experts.width, wide)
        if experts.dense:
            tally.lack(f"every block of {name} has experts", _placed(tally))
    if experts.aux:
        # Megatron sums the losses of blocks; transformers takes one over all blocks together, in which each
        # of a token's choices counts, not their mean (`load_balancing_loss_func`).
        blocks = experts.layers - (len(experts.dense) if qwen else 0)
        tally.put(f"{key}output_router_logits", True, "--moe-aux-loss-coeff")
        weight = experts.aux * blocks / experts.top_k
        tally.put(f"{key}router_aux_loss_coef", weight, "--moe-aux-loss-coeff", KINDS)
        tally.also(
            "--moe-aux-loss-coeff",
            "times blocks / top k, as transformers takes one loss over all blocks and choices",
        )
    if tally.get("--moe-z-loss-coeff"):
        tally.lack(f"{name} has no loss for its routers' scores", "--moe-z-loss-coeff")
    if _capacity(tally)[0]:
        tally.lack(f"{name} is dropless: every token is served", *CAPACITY)
    if _shared(tally, 1):
        tally.lack(f"{name} has no experts that all tokens share", *SHARED)


def _capacity(tally: Tally) -> tuple[float, tuple[str, ...]]:
    """Over an even share (0 for dropless), and the flags that say it; deepspeed_moe has its own."""
    if tally.get("--moe-model-type") == "deepspeed_moe":
        share = 0.0 if tally.get("--moe-no-drop") else float(tally.get("--moe-train-capacity-factor"))
        return share, CAPACITY[1:]
    return float(tally.get(CAPACITY[0]) or 0.0), CAPACITY[::3]


def _balance(tally: Tally) -> float:
    """The weight of the balancing loss. Megatron takes a list of kinds, and a weight for each."""
    name = "--moe-aux-loss-coeff"
    kinds = list(tally.get(KINDS)) or ["aux_loss"]
    texts = list(tally.get(name))
    try:
        weights = [float(text) for text in texts]
    except ValueError:
        weights = []
    if not weights or len(weights) not in (1, len(kinds)):
        tally.refuse(name, "expected a number, or one for each kind of balance")
        return 0.0
    if kinds == ["none"]:
        return 0.0
    if kinds != ["aux_loss"]:
        tally.refuse(
            KINDS,
            "Stretto balances by the loss of Switch Transformers over a "
            f"microbatch; append {KINDS} aux_loss, or none",
        )
    return weights[0]


def _shared(tally: Tally, width: int) -> int:
    count, total = tally.get(SHARED[1]), tally.get(SHARED[0])
    if count is not None or total is None:
        return int(count or 0)
    if total % width:
        near = max(total // width, 1) * width
        tally.refuse(
            SHARED[0], f"shared experts are as wide as the others, {width}; append {SHARED[0]} {near}"
        )
    return int(total // width)


def _placed(tally: Tally) -> str:
    return "--expert-interval" if tally.is_given("--expert-interval") else "--moe-layer-freq"


def _dense(tally: Tally, layers: int) -> tuple[int, ...]:
    """The blocks without experts. Megatron's number counts from the first block, which has experts;
    MindSpeed's from the last of each group, which has."""
    layers = min(layers, MOST_LAYERS)
    if tally.is_given("--expert-interval"):
        every = tally.need("--expert-interval")
        return tuple(n for n in range(layers) if (n + 1) % every)
    text = str(tally.get("--moe-layer-freq")).strip().strip("'\"")
    if text.isdecimal() and int(text):
        return tuple(n for n in range(layers) if n % int(text))
    pattern = _pattern(text)
    if pattern is None or len(pattern) != layers:
        tally.refuse(
            "--moe-layer-freq",
            "expected a number from 1 on, or a list of 0 and 1 for "
            f"{layers} layers, such as '([0]*1+[1]*{layers - 1})'",
        )
        return ()
    return tuple(n for n, has in enumerate(pattern) if not has)


def _placed_by(experts: ExpertFlags) -> dict[str, int] | None:
    """Settings with which just these blocks are dense; None where there are none."""
    if not experts.dense:
        return {}
    for every in range(2, min(experts.layers, MOST_LAYERS) + 1):
        if experts.dense == tuple(range(0, experts.layers, every)):
            return {"model.dense_every": every}
    first = len(experts.dense)
    return {"model.dense_first": first} if experts.dense == tuple(range(first)) else None


def _pattern(text: str) -> list[int] | None:
    """Megatron's `([0]*3+[1]*1)*2`, without running it; None for another text, or too long a list."""
    try:
        return _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _list(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts):
            made: list[Any] = [one.value for one in elts if isinstance(one, ast.Constant)]
            if len(made) == len(elts) and all(type(one) is int and one in (0, 1) for one in made):
                return made
        case ast.BinOp(left, ast.Add(), right):
            return _list(left) + _list(right)
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))):
            part = _list(left)
            if len(part) * times <= MOST_LAYERS:
                return part * times
    raise ValueError("no list of 0 and 1, or too long")

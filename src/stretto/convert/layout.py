"""The flags that distribute a step over ranks: `[parallel]`, the number of microbatches, and the pipeline.

Where no flag says which layers a stage has, `parallel.split` stays "auto"; else it is what Megatron would do:

    1. a layout, as it is written; else MindSpeed's list of layers of every rank;
    2. else so many layers on the first rank or the last, and equally many on the others;
    3. else equally many, where embedding or loss count as a layer, or the embedding has a rank of its own;
    4. layers that do nothing (MindSpeed's noop layers) are no layers: their stages have fewer, or none.

A rank's layers are shared equally by its virtual stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.config.stage_text import Stages, evenly, of_counts, read_stages
from stretto.convert.arguments import Tally, append
from stretto.convert.experts import ExpertFlags

LAYERS, NOOP = "--num-layers", "--noop-layers"
EACH, OF_EACH = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
METHOD, NANO = "--schedules-method", "--use-nanopipe"
TEXT, LIST = "--pipeline-model-parallel-layout", "--num-layer-list"
STANDALONE = "--standalone-embedding-stage"
ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")

OVERLAPPED = ("--tp-comm-overlap", "--use-ascend-mc2", "--use-ascend-coc")
PARTLY = (
    "--recompute-activations",
    "--recompute-activation-function",
    "--recompute-norm",
    "--moe-layer-recompute",
)


def put_layout(tally: Tally, experts: ExpertFlags | None, ranks: int | None, real: Sequence[int]) -> None:
    """The table `[parallel]` and the global batch. ranks: of the run; real: `real_layers`."""
    tp, pp = tally.need("--tensor-model-parallel-size"), tally.need("--pipeline-model-parallel-size")
    micro = tally.need("--micro-batch-size")
    cp = tally.need("--context-parallel-size")
    others, named = tp * pp * cp, "tp x pp" if cp == 1 else "tp x pp x cp"
    dp = _copies(tally, others, named, ranks)
    if dp is not None:
        tally.put("parallel.dp", dp, why=f"{ranks} ranks over {named} = {others}")
        _put_batch(tally, micro, dp)
        _put_shards(tally, dp, cp)
    if cp > 1:
        _put_context(tally)
    if tp > 1:
        if tally.get("--sequence-parallel"):
            tally.put("parallel.sequence_parallel", True, "--sequence-parallel")
        if any(map(tally.is_given, OVERLAPPED)):
            tally.put("parallel.split_ops", True, *OVERLAPPED)
    put_pipeline(tally, pp, real)
    if experts is not None:
        _put_experts(tally, experts, tp)
    degree = tally.get("--ampipe-degree")
    if degree != 1:
        tally.put("parallel.ampipe_degree", degree, "--ampipe-degree")
        _note_dropout(tally)
    _put_recompute(tally)


def _note_dropout(tally: Tally) -> None:
    """Of attention, which draws by itself in a fused kernel."""
    keys = ("model.dropout", "model.config.attention_dropout")
    dropped = max(tally.values.get(key) or 0.0 for key in keys)
    if dropped:
        tally.absent.append(
            f"with --ampipe-degree attention that drops ({dropped:g} here) is refused on accelerators, whose "
            f"kernel draws for a chunk by itself: {append('--attention-dropout', 0)}, and for Stretto's own "
            "models --hidden-dropout 0"
        )


STRATEGY, INSTANCES = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""What Megatron's own FSDP shares -> `zero`."""


def _put_shards(tally: Tally, dp: int, cp: int) -> None:
    """`zero`, of all flags that share something the one that shares most, and `dp_shard`."""
    kept = "--torch-fsdp2-no-reshard-after-forward"
    asked = [
        (1, ("--use-distributed-optimizer",)),
        (STRATEGIES[tally.get(STRATEGY)], ("--use-megatron-fsdp", STRATEGY)),
        (2 if tally.is_given(kept) else 3, ("--use-torch-fsdp2", kept)),
        (3, ("--enable-zero3",)),
    ]
    given = [(zero, names) for zero, names in asked if tally.is_given(names[0])]
    zero = max((zero for zero, _ in given), default=0)
    groups = tally.need(INSTANCES)
    if zero and dp % groups:
        fitting = max(count for count in range(1, groups) if dp % count == 0)
        tally.refuse(INSTANCES, f"{dp} data-parallel ranks are no multiple; append {INSTANCES} {fitting}")
    elif zero and dp // groups * cp > 1:
        names = [name for level, names in given if level == zero for name in names]
        tally.put("parallel.zero", zero, *names)
        if groups > 1:
            tally.put("parallel.dp_shard", dp // groups, INSTANCES)


CP_KINDS = {
    "p2p": "ring",
    "megatron_cp_algo": "ring",
    "all_gather": "gathered",
    "a2a": "ulysses",
    "ulysses_cp_algo": "ulysses",
}
"""Ways of context-parallel ranks -> `cp_kind`."""


def _put_context(tally: Tally) -> None:
    for flag in ("--context-parallel-algo", "--cp-comm-type"):
        given = tally.get(flag) if tally.is_given(flag) else None
        named = given if isinstance(given, list) else [given]
        kinds = {CP_KINDS.get(one, "") for one in named if one is not None}
        if len(kinds) == 1 and "" not in kinds:
            tally.put("parallel.cp_kind", kinds.pop(), flag)
        elif kinds:
            tally.lack("keys and values go around one ring in all layers", flag)


def _copies(tally: Tally, others: int, named: str, ranks: int | None) -> int | None:
    if ranks is None:
        tally.refused.append(
            "how many ranks there are, the command does not say: give --world N (or the torchrun command "
            f"with --nproc_per_node and --nnodes), a multiple of {named} = {others}"
        )
        return None
    if ranks % others:
        flags = [tally.written(n) for n in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")]
        tally.refused.append(
            f"{', '.join(flags)}: {ranks} ranks are no multiple of {named} = {others}; give --world "
            f"{-(-ranks // others) * others}, or fewer ranks to each"
        )
        return None
    return ranks // others


def _put_batch(tally: Tally, micro: int, dp: int) -> None:
    batch_size = tally.get("--global-batch-size")
    if batch_size is None:
        tally.put("training.global_batch", micro * dp, "--micro-batch-size")
    else:
        batch_size = tally.need("--global-batch-size")
        if batch_size % (micro * dp):
            each = micro * dp
            near = max(batch_size // each, 1) * each
            why = f"no multiple of {tally.written('--micro-batch-size')} times {dp} data-parallel ranks"
            tally.refuse("--global-batch-size", f"{why}; append --global-batch-size {near}")
            return
        tally.put("training.global_batch", batch_size, "--global-batch-size")
    batch = tally.values["training.global_batch"]
    tally.put("parallel.microbatches", batch // (micro * dp), "--micro-batch-size", "--global-batch-size")


def _put_experts(tally: Tally, experts: ExpertFlags, tp: int) -> None:
    ep = tally.get("--expert-model-parallel-size")
    if ep != 1:
        tally.put("parallel.ep", ep, "--expert-model-parallel-size")
    if tally.get("--expert-tensor-parallel-size") not in (None, tp):
        why = f"experts are shared by as many tensor-parallel ranks as all else, {tp}"
        tally.lack(why, "--expert-tensor-parallel-size")
    slices = tally.get("--pipe-experts-multi-data")
    if ep == 1:
        return
    if not tally.values.get("model.capacity_factor"):
        tally.absent.append(
            f"buffers of dropless experts have room for all rows, {ep} times the mean, and Megatron's are as "
            "long as what arrives: parallel.ep_buffer = 1.5 takes less memory, and of what is more the step "
            "fails or drops (parallel.ep_overflow)"
        )
    if tally.is_given("--use-pipe-experts"):
        if tally.values.get("model.capacity_factor"):
            tally.put("parallel.pipe_experts", True, "--use-pipe-experts")
        tally.lack(
            "experts are dropless, and where an expert's tokens begin is not known before they travel: they "
            "are cut in slices only (--pipe-experts-multi-data)",
            "--use-pipe-experts",
        )
        if slices != 1:
            tally.put("parallel.pipe_experts_multi_data", slices, "--pipe-experts-multi-data")


def _put_recompute(tally: Tally) -> None:
    granularity = tally.get("--recompute-granularity")
    if granularity == "full":
        tally.put("parallel.recompute", "full", "--recompute-granularity")
        method, layers = tally.get("--recompute-method"), tally.get("--recompute-num-layers")
        if method == "block":
            why = "all blocks are; with a number of bytes, parallel.recompute does no more than it must"
            tally.lack(why, "--recompute-method", "--recompute-num-layers")
        elif method == "uniform" and layers not in (None, 1):
            tally.lack("the input of every block is kept, not of one in so many", "--recompute-num-layers")
    elif granularity == "selective" or any(map(tally.is_given, PARTLY)):
        tally.put("parallel.recompute", "selective", "--recompute-granularity", *PARTLY)
    _note_gathers(tally)


def _note_gathers(tally: Tally) -> None:
    """What Megatron gathers again by itself (`linear_with_grad_accumulation_and_async_allreduce`)."""
    if tally.values.get("parallel.sequence_parallel") and tally.values.get("parallel.recompute") != "full":
        tally.absent.append(
            "with --sequence-parallel Megatron keeps a rank's part of what a matrix reads, and gathers it "
            "again in the backward; Stretto keeps what was gathered: "
            'parallel.recompute = "gathers" takes as little memory'
        )


def real_layers(tally: Tally) -> tuple[int, ...]:
    """Step 4: the numbers of the layers that do something."""
    every = tuple(range(tally.need(LAYERS)))
    text = tally.get(NOOP)
    if text is None:
        return every
    words = text.replace(",", " ").split()
    idle = {int(word) for word in words if word.isdecimal()}
    if not all(map(str.isdecimal, words)) or not idle < set(every):
        tally.refuse(
            NOOP,
            f"expected numbers of some layers, from 0 to {len(every) - 1}; append "
            f"{NOOP} with these, or leave it out",
        )
        return every
    return tuple(number for number in every if number not in idle)


def put_pipeline(tally: Tally, ranks: int, real: Sequence[int]) -> None:
    """`parallel.schedule` and what goes with it. ranks: of the pipeline; real: `real_layers`."""
    if ranks == 1:
        return
    dual = tally.get(METHOD) == "dualpipev"
    written = _written(tally, real)
    if dual:
        each = 2
    elif written is not None:
        each = max(len(written.of) // ranks, 1)
    else:
        each = _each(tally, ranks)
    if written is not None:
        tally.put("parallel.split", tally.get(TEXT), TEXT)
    else:
        _put_split(tally, ranks, each, dual, real)
    if dual:
        tally.put("parallel.schedule", "dualpipev", METHOD)
    elif each > 1:
        of = TEXT if written is not None else EACH if tally.is_given(EACH) else OF_EACH
        tally.put("parallel.schedule", "interleaved-1f1b", of)
        tally.put("parallel.virtual_stages", each, of)
        if tally.is_given(GROUP):
            tally.put("parallel.microbatch_group", tally.need(GROUP), GROUP)
        tally.lack("interleaved stages have no split backwards; zb-v, with two stages a rank, has", NANO)
    else:
        nano = [NANO] if tally.get(NANO) else []
        why = "Megatron's; eager-1f1b hides messages, for more memory"
        tally.put("parallel.schedule", "zb-h1" if nano else "1f1b", *nano, why=why)


def _each(tally: Tally, ranks: int) -> int:
    if tally.is_given(EACH):
        return tally.need(EACH)
    if not tally.is_given(OF_EACH):
        return 1
    wanted, layers = tally.need(OF_EACH), tally.need(LAYERS) + sum(bool(tally.get(name)) for name in COUNTED)
    if layers % (ranks * wanted) == 0:
        return layers // (ranks * wanted)
    fitting = [n for n in range(1, layers // ranks + 1) if layers % (ranks * n) == 0]
    nearest = min(fitting, key=lambda n: abs(n - wanted), default=None)
    hint = append(OF_EACH, nearest) if nearest else append(TEXT, evenly(tally.need(LAYERS), ranks).text)
    tally.refuse(OF_EACH, f"{layers} layers on {ranks} pipeline ranks are not shared out by {wanted}; {hint}")
    return 1


def _written(tally: Tally, real: Sequence[int]) -> Stages | None:
    text = tally.get(TEXT)
    if text is None:
        return None
    try:
        stages = read_stages(text)
    except ValueError as error:
        tally.refused.append(f"{TEXT} {error}")
        return None
    if stages.layers != len(real):
        tally.refuse(
            TEXT,
            f"it has {stages.layers} layers, and the model {len(real)}; "
            + append(TEXT, evenly(len(real), len(stages.of)).text),
        )
    return stages


def _put_split(tally: Tally, ranks: int, each: int, dual: bool, real: Sequence[int]) -> None:
    named = ((LIST,), ENDS, (STANDALONE,), COUNTED, (NOOP,))
    names = next((names for names in named if any(map(tally.is_given, names))), ())
    if not names:
        return
    layers = tally.need(LAYERS)
    counts = _of_stages(_of_ranks(tally, names, layers, ranks), each, dual)
    for at, name in ((0, COUNTED[0]), (-1, COUNTED[1])):
        if counts is not None and name in names and tally.get(name):
            counts[at] -= 1
    flags = [name for name in (*names, NOOP) if tally.is_given(name)]
    if counts is not None and sum(counts) == layers and min(counts) >= 0:
        tally.put("parallel.split", of_counts(_without(counts, real)).text, *dict.fromkeys(flags))
        return
    tally.refused.append(
        f"{', '.join(map(tally.written, flags))}: {layers} layers cannot be shared out so by {ranks} "
        f"pipeline ranks with {each} stage{'s' if each > 1 else ''} each; "
        + append(TEXT, evenly(len(real), ranks * each).text)
    )


def _of_ranks(tally: Tally, names: Sequence[str], layers: int, ranks: int) -> list[int] | None:
    """Layers of every rank, embedding and loss among them where they count as one."""
    if LIST in names:
        words = [word.strip() for word in str(tally.get(LIST)).split(",")]
        fits = len(words) == ranks and all(map(str.isdecimal, words))
        return [int(word) for word in words] if fits else None
    if STANDALONE in names:
        return [0, *[layers // (ranks - 1)] * (ranks - 1)]
    first, last = ([count] if (count := tally.get(name)) is not None else [] for name in ENDS)
    if ENDS[0] in names:
        others = ranks - len(first) - len(last)
        return [*first, *[(layers - sum(first) - sum(last)) // max(others, 1)] * others, *last]
    return [(layers + sum(bool(tally.get(name)) for name in names if name in COUNTED)) // ranks] * ranks


def _of_stages(ranks: Sequence[int] | None, each: int, dual: bool) -> list[int] | None:
    if ranks is None or any(count % each for count in ranks):
        return None
    once = [count // each for count in ranks]
    return [*once, *reversed(once)] if dual else once * each


def _without(counts: Sequence[int], real: Sequence[int]) -> list[int]:
    shares, first = [], 0
    for count in counts:
        shares.append(sum(first <= number < first + count for number in real))
        first += count
    return shares

"""The flags that spread a step over ranks: `[parallel]`, and how many microbatches there are."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.convert.experts import Experts
from stretto.convert.pipeline import put_pipeline
from stretto.convert.tally import Tally

OVERLAPPED = ("--tp-comm-overlap", "--use-ascend-mc2", "--use-ascend-coc")
PARTLY = (
    "--recompute-activations",
    "--recompute-activation-function",
    "--recompute-norm",
    "--moe-layer-recompute",
)


def put_layout(tally: Tally, experts: Experts | None, ranks: int | None, real: Sequence[int]) -> None:
    """The table `[parallel]` and the global batch. ranks: of the whole run; real: `pipeline.real_layers`."""
    tp, pp = tally.need("--tensor-model-parallel-size"), tally.need("--pipeline-model-parallel-size")
    micro = tally.need("--micro-batch-size")
    dp = _copies(tally, tp * pp, ranks)
    if dp is not None:
        tally.put("parallel.dp", dp, why=f"{ranks} ranks over tp x pp = {tp * pp}")
        _put_batch(tally, micro, dp)
    if tp > 1:
        if tally.get("--sequence-parallel"):
            tally.put("parallel.sequence_parallel", True, "--sequence-parallel")
        if any(map(tally.is_given, OVERLAPPED)):
            tally.put("parallel.split_ops", True, *OVERLAPPED)
    tally.skip("there is one tensor-parallel rank; Megatron ignores it too", "--sequence-parallel")
    tally.skip("there is one tensor-parallel rank", *OVERLAPPED)
    put_pipeline(tally, pp, real)
    if experts is not None:
        _put_experts(tally, experts, tp)
    degree = tally.get("--ampipe-degree")
    if degree != 1:
        tally.put("parallel.ampipe_degree", degree, "--ampipe-degree")
    tally.skip("one chunk is no cut", "--ampipe-degree")
    _put_recompute(tally)


def _copies(tally: Tally, others: int, ranks: int | None) -> int | None:
    """Data-parallel ranks."""
    if ranks is None:
        tally.refused.append(
            "how many ranks there are, the command does not say: give --world N (or the torchrun "
            "command with "
            f"--nproc_per_node and --nnodes, as numbers), a multiple of tp x pp = {others}"
        )
        return None
    if ranks % others:
        flags = [tally.written(n) for n in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")]
        tally.refused.append(
            f"{', '.join(flags)}: {ranks} ranks are no multiple of tp x pp = {others}; give --world "
            f"{-(-ranks // others) * others}, or fewer ranks to each"
        )
        return None
    return ranks // others


def _put_batch(tally: Tally, micro: int, dp: int) -> None:
    whole = tally.get("--global-batch-size")
    if whole is None:
        tally.put("training.global_batch", micro * dp, "--micro-batch-size")
    else:
        whole = tally.need("--global-batch-size")
        if whole % (micro * dp):
            lower, upper = whole // (micro * dp) * micro * dp, -(-whole // (micro * dp)) * micro * dp
            tally.refused.append(
                f"{tally.written('--global-batch-size')} must be a multiple of "
                f"{tally.written('--micro-batch-size')} "
                f"times {dp} data-parallel ranks; append --global-batch-size {lower or upper}"
            )
            return
        tally.put("training.global_batch", whole, "--global-batch-size")
    batch = tally.values["training.global_batch"]
    tally.put("parallel.microbatches", batch // (micro * dp), "--micro-batch-size", "--global-batch-size")


def _put_experts(tally: Tally, experts: Experts, tp: int) -> None:
    ep = tally.get("--expert-model-parallel-size")
    if ep != 1:
        tally.put("parallel.ep", ep, "--expert-model-parallel-size")
    tally.skip("every rank has all experts", "--expert-model-parallel-size")
    if tally.get("--expert-tensor-parallel-size") in (None, tp):
        tally.skip("tensor-parallel ranks share experts too", "--expert-tensor-parallel-size")
    tally.lack(
        f"experts are shared by as many tensor-parallel ranks as all else, {tp}",
        "--expert-tensor-parallel-size",
    )
    slices = tally.get("--pipe-experts-multi-data")
    if ep == 1:
        why = "it cuts what expert-parallel ranks send each other, and there is one"
        tally.skip(why, "--use-pipe-experts", "--pipe-experts-multi-data")
        return
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
        tally.skip("one slice is no cut", "--pipe-experts-multi-data")
        degree = tally.get("--ampipe-degree")
        least = degree if tally.is_given("--pipe-experts-multi-stream") else degree + 1
        if degree > 1 and (slices % degree or slices < least):
            tally.also(
                "--use-pipe-experts",
                f"MindSpeed switches it off beside {tally.written('--ampipe-degree')}, here it works",
            )


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
        tally.skip("every block is recomputed from its input", "--recompute-method", "--recompute-num-layers")
        tally.skip('"full" computes all of a block again', *PARTLY)
    elif granularity == "selective" or any(map(tally.is_given, PARTLY)):
        tally.put("parallel.recompute", "selective", "--recompute-granularity", *PARTLY)
        tally.skip("only for full recomputation", "--recompute-method", "--recompute-num-layers")

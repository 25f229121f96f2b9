"""The table of flags: what a row is, and all rows.

A flag is

  taken        it becomes settings: those of `keys`, or what `model`, `layout` and `training` make of it
  not needed   the settings do without it, and nothing is lost
  lacking      Stretto has no such thing; the settings are written without it, `why` says what happens then
  refused      without it another model or another job would be trained, so nothing is written

Names, arities and defaults are those of Megatron-LM's megatron/training/arguments.py and of MindSpeed's
mindspeed/arguments.py and features_manager.

A paragraph of a text is a reason and, indented, the flags that share it. Behind a flag's name is what it
takes (`:i` int, `:f` float, `:t` text, `:m` many, `:(a|b)` one of these); then `=` and its default or, if it
is not taken, the value with which it does nothing; then `->` and keys of settings. A reason that begins with
`needs --X:` is of flags that do nothing without --X.
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
    """A row. default: the value without the flag; with it, one that is not taken does nothing. needs: it does
    nothing without that flag."""

    name: str
    takes: Takes
    fate: Fate
    why: str = ""
    keys: tuple[str, ...] = ()
    default: Value = None
    needs: str = ""


SHORT: dict[str, Takes] = {"": "nothing", "i": "int", "f": "float", "t": "text", "m": "many"}


def _rows(fate: Fate, text: str) -> tuple[Flag, ...]:
    rows = []
    for paragraph in text.strip("\n").split("\n\n"):
        lines = paragraph.splitlines()
        why = " ".join(line for line in lines if not line.startswith(" "))
        needs = ""
        if why.startswith("needs "):
            needs, _, why = why.removeprefix("needs ").partition(":")
        for one in " ".join(line for line in lines if line.startswith(" ")).split():
            one, _, keys = one.partition("->")
            name, _, rest = one.partition(":")
            letter, _, value = rest.partition("=")
            takes = tuple(letter[1:-1].split("|")) if letter.startswith("(") else SHORT[letter]
            named = tuple(keys.split(",")) if keys else ()
            rows.append(Flag(f"--{name}", takes, fate, why.strip(), named, _default(takes, value), needs))
    return tuple(rows)


def _default(takes: Takes, text: str) -> Value:
    if takes == "nothing":
        return False
    if not text or takes == "many":
        return [text] if text else None
    return int(text) if takes == "int" else float(text) if takes == "float" else text


TAKEN = _rows(
    "taken",
    """
it is what the model has anyway
    num-layers:i hidden-size:i num-attention-heads:i group-query-attention kv-channels:i ffn-hidden-size:i
    max-position-embeddings:i
    position-embedding-type:(learned_absolute|rope|mrope|relative|none)=learned_absolute
    use-rotary-position-embeddings no-position-embedding rotary-base:f=10000
    normalization:(LayerNorm|RMSNorm)=LayerNorm norm-epsilon:f=1e-05 swiglu disable-bias-linear add-qkv-bias
    qk-layernorm untie-embeddings-and-output-weights attention-dropout:f=0.1 hidden-dropout:f=0.1
    init-method-std:f=0.02 vocab-size:i padded-vocab-size:i make-vocab-size-divisible-by:i=128
    num-experts:i

needs --group-query-attention: there are as many groups as heads
    num-query-groups:i=1

needs --num-experts: it is what the experts have anyway, or another flag says it
    moe-router-topk:i=2 moe-ffn-hidden-size:i moe-shared-expert-intermediate-size:i n-shared-experts:i
    moe-layer-freq:t=1 expert-interval:i=1 moe-expert-capacity-factor:f
    moe-model-type:(megatron_moe|deepspeed_moe)=megatron_moe moe-train-capacity-factor:f=1 moe-no-drop
    moe-router-pre-softmax moe-aux-loss-coeff:m=0.0 moe-router-load-balancing-type:m=aux_loss
    moe-z-loss-coeff:f=0 moe-router-score-function:t=softmax moe-router-enable-expert-bias
    moe-router-bias-update-rate:f=0.001 moe-router-topk-scaling-factor:f=1 moe-router-num-groups:i
    moe-router-group-topk:i

needs --num-experts: tensor-parallel ranks share experts too, and every other rank has all of them
    expert-model-parallel-size:i=1 expert-tensor-parallel-size:i use-pipe-experts

needs --use-pipe-experts: one slice is no cut, or expert-parallel ranks send nothing
    pipe-experts-multi-data:i=1

    tensor-model-parallel-size:i=1->parallel.tp pipeline-model-parallel-size:i=1->parallel.pp
    context-parallel-size:i=1->parallel.cp

there is one data-parallel rank, or another flag shares more
    use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2 enable-zero3

needs --use-megatron-fsdp: there is one data-parallel rank, or another flag shares more
    data-parallel-sharding-strategy:(no_shard|optim|optim_grads|optim_grads_params)=no_shard

needs --use-torch-fsdp2: there is one data-parallel rank, or another flag shares more
    torch-fsdp2-no-reshard-after-forward

no ranks share the optimizer's state
    num-distributed-optimizer-instances:i=1

there is one context-parallel rank
    cp-comm-type:m
    context-parallel-algo:(ulysses_cp_algo|megatron_cp_algo|hybrid_cp_algo|adaptive_cp_algo|hybrid_adaptive_cp_algo)

there is one tensor-parallel rank
    sequence-parallel tp-comm-overlap use-ascend-mc2 use-ascend-coc

one chunk is no cut
    ampipe-degree:i=1

there is one pipeline rank, or another flag says which stages it has
    use-nanopipe schedules-method:(dualpipev) num-layers-per-virtual-pipeline-stage:i
    num-virtual-stages-per-pipeline-rank:i microbatch-group-size-per-virtual-pipeline-stage:i
    pipeline-model-parallel-layout:t decoder-first-pipeline-num-layers:i decoder-last-pipeline-num-layers:i
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split standalone-embedding-stage
    num-layer-list:t noop-layers:t

"full" computes all of a block again
    recompute-activations recompute-activation-function recompute-norm
    recompute-granularity:(full|selective)

needs --num-experts: "full" computes all of a block again
    moe-layer-recompute

needs --recompute-granularity: every block is recomputed from its input
    recompute-method:(uniform|block) recompute-num-layers:i

another flag says it
    micro-batch-size:i global-batch-size:i train-iters:i train-samples:i seq-length:i->data.sequence_length
    split:t seed:i=1234->training.seed,data.seed lr:f->optimizer.lr min-lr:f=0
    lr-decay-style:(constant|linear|cosine|inverse-square-root|WSD)=linear lr-decay-iters:i
    lr-decay-samples:i lr-warmup-iters:i=0 lr-warmup-samples:i=0 lr-warmup-fraction:f adam-beta1:f=0.9
    adam-beta2:f=0.999 adam-eps:f=1e-08 weight-decay:f=0.01->optimizer.weight_decay
    clip-grad:f=1->optimizer.grad_clip_norm bf16 fp16 eval-interval:i=1000 eval-iters:i=100
    log-interval:i=100->training.log_every save-interval:i->checkpoint.every_steps save:t->checkpoint.dir
    tensorboard-dir:t

AdamW is the default
    optimizer:(adam|sgd|muon|dist_muon)=adam

only --optimizer sgd has it
    sgd-momentum:f=0.9

only --lr-decay-style WSD has it
    lr-wsd-decay-style:(exponential|linear|cosine|minus_sqrt)=exponential lr-wsd-decay-iters:i

a run goes on from its own newest checkpoint by itself (checkpoint.resume)
    load:t
""",
)
"""Of the model, its experts, the layout and the training. The reason is why a flag is not needed that no
setting comes of."""

NOT_NEEDED = _rows(
    "not needed",
    """
checkpoints are written while steps are taken (checkpoint.asynchronous), and SIGTERM saves and ends a run
    async-save exit-signal-handler

gradient reductions start inside the backward, and the order puts compute over them
    overlap-grad-reduce no-align-grad-reduce ddp-num-buckets:i ddp-bucket-size:i ddp-average-in-collective
    ddp-pad-buckets-for-high-nccl-busbw no-gradient-reduce-div-fusion

the all-to-alls of one microbatch run under the opposite pass of another (parallel.overlap = "window", the
default)
    overlap-moe-expert-parallel-comm moe-fb-overlap moe-shared-expert-overlap moe-alltoall-overlap-comm
    moe-allgather-overlap-comm moe-permutation-async-comm

tensor-parallel collectives are ops of the one graph, in chunks too; the order prefetches and delays them
    ampipe-tp-sp-comm-overlap disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
    disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-overlap-cfg:t tp-comm-bootstrap-backend:t
    no-async-tensor-model-parallel-allreduce coc-mode:i coc-parallel-num:i coc-fused-kernel
    defer-embedding-wgrad-compute wgrad-deferral-limit:i

weight gradients are ops of their own, and the order puts them under what communicates
    delay-wgrad-compute

stages are cut where their times are balanced (parallel.split)
    automated-pipeline automated-pipeline-perf

all-to-alls have a lane of their own, and the order says when each starts
    pipe-experts-multi-stream

messages between stages leave when their tensor is ready
    no-overlap-p2p-communication overlap-p2p-communication overlap-p2p-communication-warmup-flush
    optimize-send-recv-comm optimize-vpp-send-recv-comm no-scatter-gather-tensors-in-pipeline
    use-ring-exchange-p2p

a repeated op is an op as any other: the order may put it into a bubble, or before it is needed
    recompute-in-bubble recompute-in-advance

recompute = "selective" takes what saves most bytes for its time
    recompute-modules:m recompute-activation-function-num-layers:i recompute-norm-num-layers:i

Stretto makes its own communicators
    distributed-backend:t pipeline-model-parallel-comm-backend:t distributed-timeout-minutes:i
    nccl-communicator-config-path:t use-tp-pp-dp-mapping use-sharp use-nccl-ub local-rank:i
    disable-gloo-process-groups disable-gloo-group high-priority-stream-groups:m hccl-slice-size:i

it chooses an implementation; here it is PyTorch's own
    attention-backend:t use-flash-attn use-fusion-attn-v2 shape-order:t sparse-mode:i pre-tockens:i
    next-tockens:i no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
    no-bias-dropout-fusion no-rope-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl:t
    no-gradient-accumulation-fusion gemm-gradient-accumulation-fusion no-persist-layer-norm
    moe-permute-fusion moe-router-fusion use-fused-rmsnorm use-fused-swiglu use-fused-rotary-pos-emb
    use-fused-moe-token-permute-and-unpermute transformer-impl:t use-mcore-models use-legacy-models
    jit-compile use-te-activation-func

tokens travel by all-to-all; dropless experts are one grouped product, others have slots of one size
    moe-grouped-gemm moe-use-legacy-grouped-gemm moe-token-dispatcher-type:t moe-enable-deepep
    moe-deepep-num-sms:i moe-pad-expert-input-to-capacity moe-dynamic-padding enable-token-rearrange-opt

the router works in float32
    moe-router-dtype:t

gradients, their reductions and the optimizer's state are float32
    accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 reuse-fp32-param
    ddp-reduce-scatter-with-fp32-accumulation disable-bf16-reduced-precision-matmul

bfloat16 needs no scaled loss
    loss-scale:f initial-loss-scale:f min-loss-scale:f loss-scale-window:f hysteresis:i

gathers of parameters are ops of the plan, and the order puts compute over them
    overlap-param-gather overlap-param-gather-with-optimizer-step no-align-param-gather
    fsdp-double-buffer

Stretto's checkpoints have one form, are saved by all ranks and are read under any layout
    ckpt-format:t use-dist-ckpt dist-ckpt-format:t auto-detect-ckpt-format ckpt-fully-parallel-save
    no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure
    dist-ckpt-strictness:t use-persistent-ckpt-worker no-save-rng

it says how a checkpoint of Megatron's is read, and none is
    no-load-optim no-load-rng no-initialization exit-on-missing-checkpoint override-opt_param-scheduler
    override-opt-param-scheduler use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler

each parameter is drawn in float32 on the processor, from the seed and its name
    use-cpu-initialization data-parallel-random-init

batches are read from a file of tokens, and causal attention needs no mask
    num-workers:i dataloader-type:t data-cache-path:t no-mmap-bin-files num-dataset-builder-threads:i
    no-create-attention-mask-in-dataloader attention-mask-type:t attention-mask-on-cpu

it is about Megatron's own process: logs, timers, garbage, checks
    log-params-norm log-num-zeros-in-grad log-throughput log-progress log-energy timing-log-level:i
    timing-log-option:t no-barrier-with-level-1-timing tensorboard-log-interval:i tensorboard-queue-size:i
    log-timers-to-tensorboard no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard
    log-memory-to-tensorboard log-world-size-to-tensorboard log-batch-size-to-tensorboard
    log-learning-rate-to-tensorboard moe-per-layer-logging no-one-logger one-logger-project:t
    one-logger-run-name:t logging-level:i manual-gc manual-gc-interval:i no-manual-gc-eval
    empty-unused-memory-level:i no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad
    check-for-spiky-loss check-for-large-grads train-sync-interval:i optimization-level:i
    use-pytorch-profiler profile profile-step-start:i profile-step-end:i profile-ranks:m profile-level:t
    profile-with-cpu profile-with-stack profile-with-memory profile-record-shapes profile-save-path:t
    distributed-timeout-seconds-after-init:i

every token counts alike, however microbatches and copies share them
    calculate-per-token-loss

messages of context-parallel ranks are ordered by planning
    ulysses-degree-in-cp:i cp-window-size:i use-cp-send-recv-overlap use-fused-ring-attention-update
    hierarchical-context-parallel-sizes:m

it is about multi-latent attention, which is not asked for
    q-lora-rank:i kv-lora-rank:i qk-head-dim:i qk-pos-emb-head-dim:i v-head-dim:i qk-rope-head-dim:i
    qk-nope-head-dim:i rotary-scaling-factor:f mscale:f mscale-all-dim:f
""",
)

LACKING = _rows(
    "lacking",
    """
the optimizer's state stays on the device: more memory, the same numbers
    optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d swap-optimizer

groups of ranks that share the state have copies of it: more memory, the same numbers
    outer-dp-sharding-strategy:t=no_shard

activations stay on the device; parallel.recompute, with a number of bytes, keeps a limit
    swap-attention swap-modules:t smart-swap cpu-offloading-num-layers:i=0
    adaptive-recompute-device-size:i=-1 adaptive-recompute-device-swap adaptive-recompute-profiling-step:i
    adaptive-memory-optimization moe-zero-memory:t=disable moe-zero-memory-num-layers:i
    moe-adaptive-recompute-activation moe-adaptive-recompute-activation-scale:f
    distribute-saved-activations enable-recompute-layers-per-pp-rank

give the text, or the .bin of ids with data.kind = "tokens", as data.paths: else the Python standard library's
own source is trained on
    data-path:m train-data-path:m valid-data-path:m test-data-path:m data-args-path:t
    per-split-data-args-path:t mock-data

Stretto learns a byte-pair encoding of data.vocab_size tokens from the text; give --vocab-size to keep the
model's size
    tokenizer-type:t tokenizer-model:t tokenizer-name-or-path:t tokenizer-not-use-fast vocab-file:t
    merge-file:t vocab-extra-ids:i=0 legacy-tokenizer trust-remote-code

texts follow each other in a sequence, and attention and loss go over their ends; data.document_masks = true
keeps them apart
    reset-position-ids reset-attention-mask eod-mask-loss variable-seq-lengths

every step has all of the global batch, the first too
    rampup-batch-size:m

the rate begins at lr / warmup_steps, decays over all steps, and is one for all parameters
    lr-warmup-init:f=0 decoupled-lr:f decoupled-min-lr:f

weight decay stays what it is
    start-weight-decay:f end-weight-decay:f weight-decay-incr-style:t=constant

computation is in bfloat16, losses and gradient reductions in float32
    fp8-format:t fp8-recipe:t fp8-margin:i fp8-interval:i fp8-amax-history-len:i fp8-amax-compute-algo:t
    no-fp8-wgrad fp8-param-gather first-last-layers-bf16 fp4-format:t fp4-recipe:t grad-reduce-in-bf16
    fp16-lm-cross-entropy fp32-residual-connection moe-router-padding-for-fp8

a rotary position turns every pair of a head's dims by Su et al.'s angles, unscaled
    rotary-percent:f=1 rotary-interleaved rotary-seq-len-interpolation-factor:i use-rope-scaling
    rope-scaling-factor:f=1 rope-scaling-type:t rope-type:t=rope no-rope-freq:t

attention is causal over the full sequence, with PyTorch's softmax
    window-size:t window-attn-skip-freq:t softmax-type:t=vanilla apply-query-key-layer-scaling qk-l2-norm

the model's norms, activations and residuals are those of its kind
    apply-layernorm-1p apply-residual-connection-post-layernorm openai-gelu squared-relu quick-geglu
    add-dense-bias skip-bias-add init-method-xavier-uniform embedding-init-method-std:f

needs --num-experts: a router's scores are what its matrix gives, without noise
    moe-input-jitter-eps:f=0 noisy-gate-policy:t=None
    moe-router-force-load-balancing

needs --num-experts: beyond a capacity later choices are dropped first, by position
    moe-token-drop-policy:t=position no-use-rts

needs --num-experts: tensor-parallel ranks share each expert's matrices
    moe-tp-extend-ep moe-extended-tp

Megatron's checkpoints are not read: a run starts with fresh weights, or from its own checkpoint
    finetune pretrained-checkpoint:t ckpt-step:i use-checkpoint-args use-mp-args-from-checkpoint-args
    moe-use-upcycling moe-upcycling-granularity:i load-main-params-from-ckpt

a checkpoint has all that a run goes on from; the newest two stay (checkpoint.keep)
    no-save-optim save-retain-interval:i non-persistent-save-interval:i
    non-persistent-ckpt-type:t

a run ends with its last step, or where SIGTERM or SIGUSR1 asks it to save and end
    exit-interval:i exit-duration-in-mins:i adlr-autoresume adlr-autoresume-interval:i
    enable-high-availability enable-ft-package inprocess-restart

metrics are written to a file (metrics.jsonl), if asked for TensorBoard, and where callbacks of yours write
them (output.callbacks; examples/log_to_wandb.py)
    wandb-project:t wandb-entity:t wandb-exp-name:t wandb-save-dir:t

kernels are those that PyTorch takes by itself
    deterministic-mode npu-deterministic enable-cuda-graph external-cuda-graph cuda-graph-impl:t
    cuda-graph-scope:t te-rng-tracker

no average of the weights is kept
    use-ema ema-decay:f

the held-out text is measured in eval-iters batches
    full-validation
""",
)

REFUSED = _rows(
    "refused",
    """
its attention is another model: write model.kind = "huggingface" with DeepseekV3ForCausalLM by hand
    multi-latent-attention multi-head-latent-attention

needs --num-experts: this router chooses or weighs experts otherwise, which is another model: take it out
    moe-use-sinkhorn moe-apply-probs-on-input

Stretto trains causal language models of equal blocks; this flag is for another kind of model
    encoder-num-layers:i decoder-num-layers:i encoder-seq-length:i decoder-seq-length:i
    hybrid-attention-ratio:f=0 hybrid-override-pattern:t heterogeneous-layers-config-path:t spec:m
    retro-project-dir:t mtp-num-layers:i=0

Stretto trains; it does not evaluate alone, fine-tune by instructions or by reward
    skip-train sft perform-rl-step
""",
)

"""Public examples as users have them at hand: what Megatron prints, what a shell runs, what `ps` shows."""

from __future__ import annotations

GPT3_175B = {
    # A GPT of 175 billion parameters (Brown et al. 2020), as Megatron-LM's example sets and resolves it.
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-08,
    "add_bias_linear": True,
    "add_position_embedding": True,
    "add_qkv_bias": True,  # Megatron sets it where matrices have biases
    "adlr_autoresume": False,
    "attention_dropout": 0.1,
    "bf16": False,
    "clip_grad": 1.0,
    "context_parallel_size": 1,
    "data_path": ["/data/text_document"],
    "encoder_num_layers": 96,
    "eval_iters": 10,
    "ffn_hidden_size": 49152,
    "fp16": True,
    "fp8": None,
    "fp8_margin": 0,
    "global_batch_size": 1536,
    "hidden_dropout": 0.1,
    "hidden_size": 12288,
    "init_method_std": 0.006,
    "iterations_to_skip": [],
    "load": "/ckpt",
    "lr": 6e-05,
    "lr_decay_iters": 430000,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.001,
    "make_vocab_size_divisible_by": 128,
    "max_position_embeddings": 2048,
    "micro_batch_size": 1,
    "min_lr": 6e-06,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_topk": 2,
    "num_attention_heads": 96,
    "num_experts": None,
    "num_layers": 96,
    "pipeline_model_parallel_size": 16,
    "position_embedding_type": "learned_absolute",
    "rampup_batch_size": ["16", "16", "5859375"],
    "save": "/ckpt",
    "save_interval": 10000,
    "seed": 1234,
    "seq_length": 2048,
    "split": "949,50,1",
    "tensor_model_parallel_size": 8,
    "train_iters": 500000,
    "vocab_file": "/data/gpt2-vocab.json",
    "vocab_size": None,
    "weight_decay": 0.1,
    "world_size": 1024,
}

MIXTRAL_8X7B = r"""
torchrun --nproc_per_node 8 --nnodes=4 --master_addr localhost pretrain_gpt.py \
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm \
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights \
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding \
    --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 \
    # --moe-grouped-gemm \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce \
    --log-interval 1 --eval-iters 10 --no-load-optim \
    --tokenizer-type Llama2Tokenizer --tokenizer-model /workspace/tokenizer.model --vocab-size 32000 \
    --data-path '/my data/text' --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 \
    --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 \
    --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \
    --num-layers-per-virtual-pipeline-stage 8 --expert-model-parallel-size 8 \
    --use-distributed-optimizer --sequence-parallel
"""

AMPIPE = (
    # MindSpeed's AMPipe beside pipe-experts, two hosts of eight, as `ps -eo args` shows it.
    "python -m torch.distributed.launch --nproc_per_node 8 --nnodes 2 --node_rank 0 pretrain_gpt.py "
    "--tensor-model-parallel-size 1 --num-layers 2 --hidden-size 12288 --num-attention-heads 96 "
    "--seq-length 131072 --max-position-embeddings 131072 --micro-batch-size 1 --global-batch-size 32 "
    "--lr 1.0e-6 --train-iters 1000 --hidden-dropout 0 --attention-dropout 0 --disable-bias-linear "
    "--use-flash-attn --use-legacy-models --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 2 --fp16 --moe-model-type deepspeed_moe --num-experts 4 --moe-router-topk 2 "
    "--moe-train-capacity-factor 1.1 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--expert-model-parallel-size 2 --ampipe-degree 2 --ampipe-tp-sp-comm-overlap --use-pipe-experts "
    "--pipe-experts-multi-data 4 --pipe-experts-multi-stream"
)


def table(arguments: dict[str, object], **changed: object) -> str:
    """What Megatron prints of its arguments, within a log."""
    rows = [
        f"  {name} {'.' * (48 - len(name))} {value}"
        for name, value in sorted({**arguments, **changed}.items())
    ]
    return "\n".join(
        [
            "using torch.float16 for parameters ...",
            "------------------------ arguments ------------------------",
            *rows,
            "-------------------- end of arguments ---------------------",
            "> building GPT2BPETokenizer tokenizer ...",
        ]
    )

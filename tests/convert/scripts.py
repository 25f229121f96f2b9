"""Scripts as users have them: the shapes and numbers of public examples, in the ways of writing them."""

GPT3_175B = r"""#!/bin/bash
# A GPT of 175 billion parameters (Brown et al. 2020), as Megatron-LM's example starts it.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=6000
NUM_NODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT_PATH=$1 #<a path>
VOCAB_FILE=$2 #<a path>/gpt2-vocab.json
DATA_PATH=$3

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)

GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # or flash, fused
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)

MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)

DATA_ARGS=(
    --data-path $DATA_PATH
    --vocab-file $VOCAB_FILE
    --split 949,50,1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --eval-iters 10
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${EVAL_AND_LOGGING_ARGS[@]}
"""

MIXTRAL_8X7B = r"""#!/bin/bash
GPUS_PER_NODE=8
MASTER_ADDR=${MASTER_ADDR:-"localhost"}
NNODES=${SLURM_NNODES:-"4"}
TOKENIZER_MODEL=/workspace/tokenizer.model
DATA_PATH=$3

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr $MASTER_ADDR
)

MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --no-masked-softmax-fusion
    --no-position-embedding
    --rotary-base 1000000
)

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
#    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)

LOGGING_ARGS=(
    --log-interval 1 \
   # --save-interval 10000 \
    --eval-iters 10 \
    --no-load-optim \
)

if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
    )
fi

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${MOE_ARGS[@]} \
    --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL} --vocab-size 32000 \
    --data-path $DATA_PATH --split 99990,8,2 \
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 \
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 \
    --lr-warmup-iters 500 --clip-grad 1.0 --bf16 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \
    --num-layers-per-virtual-pipeline-stage 8 --expert-model-parallel-size 8 \
    --use-distributed-optimizer --sequence-parallel \
    ${LOGGING_ARGS[@]}
"""

AMPIPE = r"""#!/bin/bash
# MindSpeed's AMPipe beside pipe-experts, two hosts of eight, in text variables.
NPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=1
EP=2
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank 0
"
MOE_ARGS="
    --moe-model-type deepspeed_moe \
    --num-experts 4 \
    --moe-router-topk 2 \
    --moe-train-capacity-factor 1.1 \
    --moe-aux-loss-coeff 0.01 \
    --moe-z-loss-coeff 0.001 \
    --expert-model-parallel-size ${EP} \
    --ampipe-degree 2 \
    --ampipe-tp-sp-comm-overlap \
    --use-pipe-experts \
    --pipe-experts-multi-data 4 \
    --pipe-experts-multi-stream
"
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --num-layers 2 \
    --hidden-size 12288 \
    --num-attention-heads 96 \
    --seq-length 131072 \
    --max-position-embeddings 131072 \
    --micro-batch-size 1 \
    --global-batch-size 32 \
    --lr 1.0e-6 \
    --train-iters 1000 \
    --hidden-dropout 0 --attention-dropout 0 \
    --disable-bias-linear \
    --use-flash-attn \
    --use-legacy-models \
    --recompute-granularity full --recompute-method block --recompute-num-layers 2 \
    --fp16
"
python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS $MOE_ARGS \
    2>&1 | tee logs/train.log
"""

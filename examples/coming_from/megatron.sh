#!/bin/bash
# Megatron-LM's own; Stretto reads it: stretto convert --megatron-file examples/coming_from/megatron.sh -o small.toml
torchrun --nproc-per-node 2 pretrain_gpt.py \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
    --seq-length 64 --max-position-embeddings 64 \
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 \
    --micro-batch-size 2 --global-batch-size 16 \
    --train-iters 20 --lr 2e-3 --lr-warmup-iters 5 --clip-grad 1.0 \
    --use-distributed-optimizer --data-path corpus_text_document

"""Every row of the table of flags is exercised: what it takes, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config import TrainSettings
from stretto.convert.arguments import ALIASES, ROWS, TABLE, read_arguments
from stretto.convert.flags import Flag
from stretto.convert.megatron import Conversion, convert
from stretto.errors import UsageError
from stretto.files.parse import parse_toml

OWN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
    "--train-iters 100 --lr 1e-3"
)
LLAMA = f"{OWN} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
MOE = f"{OWN} --num-experts 8"
MIXTRAL = f"{LLAMA} --num-experts 8"
SHARED = f"{MOE} --expert-model-parallel-size 2 --moe-expert-capacity-factor 1.5"
FULL = f"{OWN} --recompute-granularity full"
TWO = f"{OWN} --pipeline-model-parallel-size 2"
TWICE = f"{TWO} --num-virtual-stages-per-pipeline-rank 2"
DUAL = f"{TWO} --schedules-method dualpipev"


AGAIN = "the flag is given again"


def settings(made: Conversion) -> TrainSettings:
    return TrainSettings.model_validate(parse_toml(made.text))


def value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part] if isinstance(tree, dict) else getattr(tree, part)
    return tree


CASES: dict[str, list[tuple[str, str, str, Any]]] = {
    # flag: [the rest of the command, the flag's value, a setting (~: that others make too), its value]
    "--num-layers": [(OWN, "6", "model.layers", 6), (LLAMA, "6", "model.config.num_hidden_layers", 6)],
    "--hidden-size": [(OWN, "96", "model.hidden", 96), (LLAMA, "96", "model.config.hidden_size", 96)],
    "--num-attention-heads": [
        (OWN, "8", "model.heads", 8),
        (LLAMA, "8", "model.config.num_attention_heads", 8),
        (LLAMA, "8", "model.config.num_key_value_heads", 8),
    ],
    "--group-query-attention": [(f"{LLAMA} --num-query-groups 2", "", "model.config.num_key_value_heads", 2)],
    "--num-query-groups": [(f"{LLAMA} --group-query-attention", "2", "model.config.num_key_value_heads", 2)],
    "--kv-channels": [(LLAMA, "32", "model.config.head_dim", 32)],
    "--ffn-hidden-size": [
        (OWN, "96", "model.mlp_ratio", 1.5),
        (LLAMA, "96", "model.config.intermediate_size", 96),
        (MOE, "96", "model.expert_ratio", 1.5),
        (MIXTRAL, "96", "model.config.intermediate_size", 96),
    ],
    "--max-position-embeddings": [
        (OWN, "256", "model.context", 256),
        (LLAMA, "256", "model.config.max_position_embeddings", 256),
    ],
    "--position-embedding-type": [(OWN, "rope", "model.positions", "rotary")],
    "--use-rotary-position-embeddings": [(OWN, "", "model.positions", "rotary")],
    "--rotary-base": [(LLAMA, "500000", "model.config.rope_theta", 500000.0)],
    "--normalization": [(LLAMA, "RMSNorm", "model.architecture", "LlamaForCausalLM")],
    "--norm-epsilon": [(LLAMA, "1e-6", "model.config.rms_norm_eps", 1e-6)],
    "--swiglu": [(LLAMA, "", "model.kind", "huggingface")],
    "--disable-bias-linear": [],
    "--add-qkv-bias": [(LLAMA, "", "model.architecture", "Qwen2ForCausalLM")],
    "--qk-layernorm": [
        (LLAMA, "", "model.architecture", "Qwen3ForCausalLM"),
        (MIXTRAL, "", "model.architecture", "Qwen3MoeForCausalLM"),
    ],
    "--untie-embeddings-and-output-weights": [
        (OWN, "", "model.tie_embeddings", False),
        (LLAMA, "", "model.config.tie_word_embeddings", False),
    ],
    "--attention-dropout": [
        (LLAMA, "0.2", "model.config.attention_dropout", 0.2),
        (f"{OWN} --hidden-dropout 0", "0", "model.dropout", 0.0),
    ],
    "--hidden-dropout": [(OWN, "0.2", "model.dropout", 0.2)],
    "--init-method-std": [(LLAMA, "0.01", "model.config.initializer_range", 0.01)],
    "--vocab-size": [
        (OWN, "1000", "model.vocab_size", 1024),
        (OWN, "1000", "data.vocab_size", 1000),
        (LLAMA, "1000", "model.config.vocab_size", 1024),
    ],
    "--padded-vocab-size": [(OWN, "1000", "model.vocab_size", 1000), (OWN, "1000", "data.vocab_size", 1000)],
    "--make-vocab-size-divisible-by": [
        (f"{OWN} --vocab-size 1000 --tensor-model-parallel-size 2", "3", "model.vocab_size", 1002)
    ],
    "--num-experts": [
        (OWN, "8", "model.kind", "moe"),
        (OWN, "8", "model.experts", 8),
        (LLAMA, "8", "model.config.num_local_experts", 8),
        (f"{LLAMA} --qk-layernorm", "8", "model.config.num_experts", 8),
    ],
    "--moe-router-topk": [
        (MOE, "3", "model.top_k", 3),
        (MIXTRAL, "3", "model.config.num_experts_per_tok", 3),
        (f"{MIXTRAL} --qk-layernorm", "1", "~model.config.norm_topk_prob", False),
        (f"{MIXTRAL} --qk-layernorm", "2", "~model.config.norm_topk_prob", True),
    ],
    "--moe-ffn-hidden-size": [
        (MOE, "32", "model.expert_ratio", 0.5),
        (MIXTRAL, "32", "model.config.intermediate_size", 32),
        (f"{MIXTRAL} --qk-layernorm", "32", "model.config.moe_intermediate_size", 32),
    ],
    "--moe-shared-expert-intermediate-size": [
        (f"{MOE} --moe-ffn-hidden-size 32", "64", "model.shared_experts", 2)
    ],
    "--n-shared-experts": [(MOE, "2", "model.shared_experts", 2)],
    "--moe-layer-freq": [
        (MOE, "'([0]*1+[1]*3)'", "model.dense_every", 4),
        (MOE, "[0,1]*2", "model.dense_every", 2),
        (f"{MIXTRAL} --qk-layernorm", "[1,0,0,1]", "model.config.mlp_only_layers", [1, 2]),
    ],
    "--expert-interval": [(MOE, "2", "model.dense_every", 2)],
    "--moe-expert-capacity-factor": [(MOE, "1.5", "model.capacity_factor", 1.5)],
    "--moe-model-type": [(MOE, "deepspeed_moe", "model.capacity_factor", 1.0)],
    "--moe-train-capacity-factor": [
        (f"{MOE} --moe-model-type deepspeed_moe", "1.2", "model.capacity_factor", 1.2)
    ],
    "--moe-no-drop": [(f"{MOE} --moe-model-type deepspeed_moe", "", "model.capacity_factor", 0.0)],
    "--moe-aux-loss-coeff": [
        (MOE, "0.02", "model.aux_weight", 0.02),
        (MIXTRAL, "0.02", "model.config.router_aux_loss_coef", 0.04),
        (MIXTRAL, "0.02", "model.config.output_router_logits", True),
    ],
    "--moe-router-load-balancing-type": [
        (f"{MOE} --moe-aux-loss-coeff 0.1", "none", "model.aux_weight", 0.0)
    ],
    "--moe-z-loss-coeff": [(MOE, "0.02", "model.z_weight", 0.02)],
    "--expert-model-parallel-size": [(MOE, "4", "parallel.ep", 4)],
    "--expert-tensor-parallel-size": [],
    "--use-pipe-experts": [(SHARED, "", "parallel.pipe_experts", True)],
    "--pipe-experts-multi-data": [
        (f"{SHARED} --use-pipe-experts", "3", "parallel.pipe_experts_multi_data", 3)
    ],
    "--tensor-model-parallel-size": [(OWN, "2", "parallel.tp", 2)],
    "--pipeline-model-parallel-size": [
        (OWN, "2", "parallel.pp", 2),
        (OWN, "2", "~parallel.schedule", "1f1b"),
    ],
    "--sequence-parallel": [
        (f"{OWN} --tensor-model-parallel-size 2", "", "parallel.sequence_parallel", True)
    ],
    "--ampipe-degree": [(OWN, "4", "parallel.ampipe_degree", 4)],
    "--use-nanopipe": [(TWO, "", "parallel.schedule", "zb-h1")],
    "--schedules-method": [(TWO, "dualpipev", "parallel.schedule", "dualpipev")],
    "--num-layers-per-virtual-pipeline-stage": [
        (TWO, "1", "parallel.virtual_stages", 2),
        (TWO, "1", "parallel.schedule", "interleaved-1f1b"),
        (f"{TWO} --num-layers 3 --account-for-loss-in-pipeline-split", "1", "parallel.virtual_stages", 2),
    ],
    "--num-virtual-stages-per-pipeline-rank": [
        (f"{TWO} --num-layers 8", "4", "parallel.virtual_stages", 4),
        (TWO, "2", "parallel.schedule", "interleaved-1f1b"),
    ],
    "--microbatch-group-size-per-virtual-pipeline-stage": [(TWICE, "2", "parallel.microbatch_group", 2)],
    "--pipeline-model-parallel-layout": [
        (TWO, "'Et*3|tL'", "parallel.split", "Et*3|tL"),
        (TWO, "'E|(t|)*4||L'", "parallel.split", "E|(t|)*4||L"),
        (TWO, "'Et|t|t|tL'", "parallel.virtual_stages", 2),
        (TWO, "'Et|t|t|tL'", "parallel.schedule", "interleaved-1f1b"),
        (f"{LLAMA} --pipeline-model-parallel-size 4", "'Et|ttt||L'", "parallel.split", "Et|ttt||L"),
    ],
    "--decoder-first-pipeline-num-layers": [
        (TWO, "1", "parallel.split", "embedding,layer|layer*3,loss"),
        (
            f"{TWO} --pipeline-model-parallel-size 4",
            "1",
            "parallel.split",
            "embedding,layer|layer|layer|layer,loss",
        ),
        (f"{TWO} --decoder-last-pipeline-num-layers 4", "0", "parallel.split", "embedding|layer*4,loss"),
    ],
    "--decoder-last-pipeline-num-layers": [
        (TWO, "1", "parallel.split", "embedding,layer*3|layer,loss"),
        (
            f"{TWICE} --num-layers 6",
            "2",
            "parallel.split",
            "embedding,layer*2|layer|layer*2|layer,loss",
        ),
    ],
    "--account-for-embedding-in-pipeline-split": [
        (f"{TWO} --num-layers 5", "", "parallel.split", "embedding,layer*2|layer*3,loss"),
    ],
    "--account-for-loss-in-pipeline-split": [
        (f"{TWO} --num-layers 5", "", "parallel.split", "embedding,layer*3|layer*2,loss"),
        (
            f"{TWICE} --num-layers 6 --account-for-embedding-in-pipeline-split",
            "",
            "parallel.split",
            "embedding,layer|layer*2|layer*2|layer,loss",
        ),
        (
            f"{TWICE} --num-layers 2 --account-for-embedding-in-pipeline-split",
            "",
            "parallel.split",
            "embedding|layer|layer|loss",
        ),
    ],
    "--standalone-embedding-stage": [(TWO, "", "parallel.split", "embedding|layer*4,loss")],
    "--num-layer-list": [(TWO, "1,3", "parallel.split", "embedding,layer|layer*3,loss")],
    "--noop-layers": [
        (OWN, "0,3", "model.layers", 2),
        (TWO, "3", "model.layers", 3),
        (TWO, "3", "parallel.split", "embedding,layer*2|layer,loss"),
        (f"{TWO} --pipeline-model-parallel-size 4", "0,3", "parallel.split", "embedding|layer|layer|loss"),
        (f"{TWICE} --num-layers 8", "2,3", "parallel.split", "embedding,layer*2||layer*2|layer*2,loss"),
        (f"{DUAL} --num-layers 8", "7", "parallel.split", "embedding,layer*2|layer*2|layer*2|layer,loss"),
        (f"{MOE} --moe-layer-freq [0,0,1,1]", "0", "~model.dense_every", 3),
    ],
    **{
        name: [(f"{OWN} --tensor-model-parallel-size 2", "", "parallel.split_ops", True)]
        for name in ("--tp-comm-overlap", "--use-ascend-mc2", "--use-ascend-coc")
    },
    "--recompute-granularity": [
        (OWN, "full", "parallel.recompute", "full"),
        (OWN, "selective", "parallel.recompute", "selective"),
    ],
    "--recompute-method": [],
    "--recompute-num-layers": [],
    **{
        name: [(MOE, "", "parallel.recompute", "selective")]
        for name in (
            "--recompute-activations",
            "--recompute-activation-function",
            "--recompute-norm",
            "--moe-layer-recompute",
        )
    },
    "--micro-batch-size": [
        (f"{OWN} --global-batch-size 96", "3", "parallel.microbatches", 4),
        (OWN, "3", "training.global_batch", 24),
    ],
    "--global-batch-size": [
        (OWN, "48", "training.global_batch", 48),
        (OWN, "48", "parallel.microbatches", 3),
    ],
    "--train-iters": [(OWN, "7", "training.steps", 7)],
    "--train-samples": [(OWN.replace("--train-iters 100", ""), "165", "training.steps", 10)],
    "--seq-length": [(OWN, "64", "data.sequence_length", 64), (OWN, "64", "model.context", 64)],
    "--split": [(OWN, "90,5,5", "data.held_out_fraction", 0.1)],
    "--seed": [(OWN, "7", "training.seed", 7), (OWN, "7", "data.seed", 7)],
    "--optimizer": [],
    "--lr": [(OWN, "3e-4", "optimizer.lr", 3e-4)],
    "--min-lr": [(OWN, "1e-4", "lr_schedule.min_lr_ratio", 0.1)],
    "--lr-decay-style": [(OWN, "constant", "lr_schedule.kind", "constant")],
    "--lr-decay-iters": [],
    "--lr-decay-samples": [],
    "--lr-warmup-iters": [(OWN, "9", "lr_schedule.warmup_steps", 9)],
    "--lr-warmup-samples": [(OWN, "33", "lr_schedule.warmup_steps", 3)],
    "--lr-warmup-fraction": [(OWN, "0.05", "lr_schedule.warmup_steps", 5)],
    "--adam-beta1": [(OWN, "0.8", "optimizer.betas", (0.8, 0.999))],
    "--adam-beta2": [(OWN, "0.95", "optimizer.betas", (0.9, 0.95))],
    "--adam-eps": [(OWN, "1e-6", "optimizer.eps", 1e-6)],
    "--weight-decay": [(OWN, "0", "optimizer.weight_decay", 0.0)],
    "--clip-grad": [(OWN, "0.5", "optimizer.grad_clip_norm", 0.5)],
    "--bf16": [(OWN, "", "precision", "bf16")],
    "--fp16": [],
    "--eval-interval": [(OWN, "50", "training.eval_every", 50)],
    "--eval-iters": [(OWN, "5", "training.eval_batches", 5), (OWN, "0", "training.eval_every", 0)],
    "--log-interval": [(OWN, "1", "training.log_every", 1)],
    "--save": [(OWN, "'my runs/a'", "checkpoint.dir", "my runs/a")],
    "--load": [],
    "--save-interval": [(OWN, "20", "checkpoint.every_steps", 20)],
    "--tensorboard-dir": [(OWN, "logs", "output.tensorboard", True)],
    "--no-position-embedding": [],
}
ELSE: dict[str, list[tuple[str, str, str]]] = {
    # flag: [the rest of the command, the flag's value, what becomes of it]
    "--disable-bias-linear": [(OWN, "", "not needed"), (MIXTRAL, "", "not needed")],
    "--no-position-embedding": [(LLAMA, "", "not needed")],
    "--expert-tensor-parallel-size": [
        (MOE, "1", "not needed"),
        (f"{MOE} --expert-model-parallel-size 1", "2", "lacking"),
    ],
    "--recompute-method": [(FULL, "uniform", "not needed"), (FULL, "block", "lacking")],
    "--recompute-num-layers": [
        (f"{FULL} --recompute-method uniform", "1", "not needed"),
        (f"{FULL} --recompute-method uniform", "2", "lacking"),
        (OWN, "2", "not needed"),
    ],
    "--optimizer": [(OWN, "adam", "not needed")],
    "--lr-decay-iters": [
        (OWN, "100", "not needed"),
        (OWN, "80", "lacking"),
        (f"{OWN} --lr-decay-style constant", "80", "not needed"),
    ],
    "--lr-decay-samples": [(OWN, "1600", "not needed"), (OWN, "800", "lacking")],
    "--fp16": [(OWN, "", "lacking")],
    "--load": [(OWN, "a", "lacking"), (f"{OWN} --save a", "a", "not needed")],
    "--group-query-attention": [
        (OWN, "", "lacking"),
        (f"{OWN} --num-query-groups 4", "", "not needed"),
    ],
    "--num-query-groups": [(LLAMA, "2", "not needed")],
    "--kv-channels": [(OWN, "16", "not needed"), (f"{LLAMA} --add-qkv-bias", "32", "lacking")],
    "--position-embedding-type": [(LLAMA, "rope", "not needed")],
    "--rotary-base": [(OWN, "10000", "not needed"), (OWN, "50000", "lacking")],
    "--normalization": [(OWN, "LayerNorm", "not needed"), (OWN, "RMSNorm", "lacking")],
    "--norm-epsilon": [(OWN, "1e-5", "not needed"), (OWN, "1e-6", "lacking")],
    "--init-method-std": [(OWN, "0.02", "not needed"), (OWN, "0.006", "lacking")],
    "--swiglu": [(OWN, "", "lacking")],
    "--qk-layernorm": [(OWN, "", "lacking")],
    "--add-qkv-bias": [(OWN, "", "lacking"), (MIXTRAL, "", "lacking")],
    "--attention-dropout": [(f"{OWN} --hidden-dropout 0", "0.1", "lacking")],
    "--hidden-dropout": [(LLAMA, "0.1", "lacking"), (LLAMA, "0", "not needed")],
    "--make-vocab-size-divisible-by": [(OWN, "128", "not needed")],
    "--moe-expert-capacity-factor": [
        (MIXTRAL, "1.5", "lacking"),
        (f"{MOE} --moe-model-type deepspeed_moe", "1.5", "not needed"),
        (OWN, "1.5", "not needed"),
    ],
    "--moe-train-capacity-factor": [(MOE, "1.5", "not needed")],
    "--moe-model-type": [(MIXTRAL, "megatron_moe", "not needed"), (MIXTRAL, "deepspeed_moe", "lacking")],
    "--moe-z-loss-coeff": [(MIXTRAL, "0.1", "lacking"), (MIXTRAL, "0", "not needed")],
    "--n-shared-experts": [(MIXTRAL, "1", "lacking"), (MIXTRAL, "0", "not needed")],
    "--moe-shared-expert-intermediate-size": [(MIXTRAL, "32", "lacking")],
    "--moe-aux-loss-coeff": [(MIXTRAL, "0", "not needed")],
    "--moe-layer-freq": [(MOE, "1", "not needed"), (MIXTRAL, "[0,1,1,1]", "lacking")],
    "--expert-interval": [(MOE, "1", "not needed")],
    "--expert-model-parallel-size": [(MOE, "1", "not needed"), (OWN, "2", "not needed")],
    "--use-pipe-experts": [
        (MOE, "", "not needed"),
        (f"{MOE} --expert-model-parallel-size 2", "", "lacking"),
        (f"{MIXTRAL} --expert-model-parallel-size 2", "", "lacking"),
    ],
    "--pipe-experts-multi-data": [
        (SHARED, "2", "not needed"),
        (f"{SHARED} --use-pipe-experts", "1", "not needed"),
        (f"{MOE} --use-pipe-experts", "2", "not needed"),
    ],
    "--sequence-parallel": [(OWN, "", "not needed")],
    "--ampipe-degree": [(OWN, "1", "not needed")],
    "--use-nanopipe": [(OWN, "", "not needed"), (DUAL, "", "not needed"), (TWICE, "", "lacking")],
    "--schedules-method": [(OWN, "dualpipev", "not needed")],
    "--num-layers-per-virtual-pipeline-stage": [
        (OWN, "1", "not needed"),
        (TWO, "2", "not needed"),
        (DUAL, "1", "not needed"),
        (TWICE, "1", "not needed"),
    ],
    "--num-virtual-stages-per-pipeline-rank": [(TWO, "1", "not needed"), (DUAL, "4", "not needed")],
    "--microbatch-group-size-per-virtual-pipeline-stage": [
        (TWO, "2", "not needed"),
        (DUAL, "2", "not needed"),
    ],
    "--pipeline-model-parallel-layout": [(OWN, "'EttttL'", "not needed")],
    "--num-layer-list": [
        (f"{TWO} --pipeline-model-parallel-layout 'Et|tttL'", "2,2", "not needed"),
    ],
    "--account-for-loss-in-pipeline-split": [
        (f"{TWO} --decoder-last-pipeline-num-layers 1", "", "not needed"),
    ],
    "--tp-comm-overlap": [(OWN, "", "not needed")],
    "--train-samples": [(OWN, "100", "not needed")],
    "--min-lr": [(f"{OWN} --lr-decay-style constant", "0", "not needed")],
    "--lr-warmup-iters": [(f"{OWN} --lr-warmup-fraction 0.1", "5", "not needed")],
    "--eval-interval": [(f"{OWN} --eval-iters 0", "5", "not needed")],
    "--split": [(OWN, "100,0,0", "lacking"), (OWN, "100", "lacking")],
    "--recompute-norm": [(FULL, "", "not needed")],
}


def test_every_taken_flag_has_a_case() -> None:
    taken = {row.name for row in ROWS if row.fate == "taken"}
    assert set(CASES) == taken
    assert {name for name in taken if not CASES[name] and not ELSE.get(name)} == set()


@pytest.mark.parametrize(
    ("name", "rest", "given", "key", "expected"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_a_taken_flag_becomes_a_setting(name: str, rest: str, given: str, key: str, expected: Any) -> None:
    made = convert([rest, f"{name} {given}"], ranks=8)
    got = value(settings(made), key.removeprefix("~"))
    assert got == (pytest.approx(expected) if isinstance(expected, float) else expected)
    assert type(got) is type(expected)
    (found,) = [one for one in made.outcomes if one.flag.split()[0] == name and one.what != AGAIN]
    assert found.fate == "taken"
    assert key.startswith("~") or f"{key} = " in found.what


@pytest.mark.parametrize(
    ("name", "rest", "given", "fate"), [(name, *case) for name, cases in ELSE.items() for case in cases]
)
def test_a_taken_flag_that_does_nothing_says_why(name: str, rest: str, given: str, fate: str) -> None:
    made = convert([rest, f"{name} {given}"], ranks=8)
    settings(made)
    (found,) = [one for one in made.outcomes if one.flag.split()[0] == name and one.what != AGAIN]
    assert found.fate == fate
    assert len(found.what) > 8
    assert (f"{fate}: {found.flag}: {found.what}" in made.text) == (fate == "lacking")


SAMPLES = {"nothing": "", "int": "3", "float": "0.5", "text": "word", "many": "1 2"}


def written(row: Flag) -> str:
    given = row.takes[0] if isinstance(row.takes, tuple) else SAMPLES[row.takes]
    return f"{row.name} {given}".strip()


def test_other_flags_say_why_and_change_nothing() -> None:
    base = f"{MOE} --recompute-granularity full --use-pipe-experts --bf16"
    rows = [row for row in ROWS if row.fate in ("not needed", "lacking")]
    assert len(rows) > 250
    made = convert([base, *map(written, rows)], ranks=8)
    assert settings(made) == settings(convert([base], ranks=8))
    said = {one.flag: (one.fate, one.what) for one in made.outcomes}
    assert [row.name for row in rows if said[written(row)] != (row.fate, row.why)] == []
    assert [row.name for row in rows if (row.why in made.text) != (row.fate == "lacking")] == []


def test_refused_flags_say_why_and_write_nothing() -> None:
    rows = [row for row in ROWS if row.fate == "refused"]
    assert len(rows) > 10
    with pytest.raises(UsageError) as refused:
        convert([MOE, *map(written, rows)], ranks=8)
    assert str(refused.value).split("\n") == [f"{written(row)}: {row.why}" for row in rows]


def test_an_idle_value_is_not_needed() -> None:
    rows = [row for row in ROWS if row.idle is not None]
    made = convert([MOE, *(f"{row.name} {row.idle}" for row in rows)], ranks=8)
    idle = [one for one in made.outcomes if one.what == "with this value it does nothing"]
    assert [one.flag for one in idle] == [f"{row.name} {row.idle}" for row in rows]
    assert {one.fate for one in idle} == {"not needed"}
    assert settings(made) == settings(convert([MOE], ranks=8))


def test_a_flag_that_needs_another_does_nothing_alone() -> None:
    rows = [row for row in ROWS if row.needs and row.needs not in ("--use-pipe-experts", "--num-experts")]
    rows += [row for row in ROWS if row.needs == "--num-experts" and row.fate != "refused"]
    made = convert([OWN, *map(written, rows)], ranks=8)
    said = {one.flag: (one.fate, one.what) for one in made.outcomes}
    for row in rows:
        if row.name != "--num-experts":
            assert said[written(row)] == ("not needed", f"it does nothing without {row.needs}")
    assert settings(made) == settings(convert([OWN], ranks=8))


def test_names_are_once_and_needs_and_aliases_are_rows() -> None:
    assert len(TABLE) == len(ROWS)
    assert {row.needs for row in ROWS} - {""} <= set(TABLE)
    assert set(ALIASES.values()) <= set(TABLE)
    assert not set(ALIASES) & set(TABLE)
    assert [row.name for row in ROWS if row.fate != "taken" and not row.why] == []


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_an_older_name_is_the_same_flag(old: str, new: str) -> None:
    given = SAMPLES[str(TABLE[new].takes)].replace("3", "2")
    made, again = (convert([OWN, f"{name} {given}"], ranks=8) for name in (old, new))
    assert settings(made) == settings(again)
    assert [one.fate for one in made.outcomes if one.flag == f"{old} {given}".strip()] == ["taken"]


def test_values_are_read_strictly() -> None:
    """A flag without its value, one with a value too many, and a word where a number belongs."""
    for row in ROWS:
        wrong = []
        if row.takes == "nothing":
            wrong = [([f"{row.name}=1"], f"{row.name}=1: the flag takes no value; write {row.name}")]
        elif row.takes != "many":
            wrong = [
                ([row.name], f"{row.name}: a value must follow"),
                ([row.name, "--a"], "a value must follow"),
            ]
        if row.takes == "int":
            wrong += [([row.name, "1.5"], "expected a whole number"), ([f"{row.name}="], "expected a whole")]
        if row.takes == "float":
            wrong += [([row.name, "x"], "expected a number"), ([row.name, "nan"], "expected a number")]
        if isinstance(row.takes, tuple):
            wrong += [([row.name, "wrong"], f"{row.name} wrong: expected {' or '.join(row.takes)}")]
        for words, said in wrong:
            found = read_arguments(words)
            assert row.name not in found.by_name
            assert len(found.faults) == 1
            assert said in found.faults[0]

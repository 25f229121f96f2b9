"""Every row of the table of flags is exercised: what it takes, and what becomes of it."""

from __future__ import annotations

import ast
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
BASES = {
    "OWN": OWN, "LLAMA": LLAMA, "MOE": MOE, "MIXTRAL": MIXTRAL, "SHARED": SHARED, "FULL": FULL, "TWO": TWO,
    "TWICE": TWICE, "DUAL": DUAL, "SAMPLES": OWN.replace("--train-iters 100", ""),
}  # fmt: skip


def settings(made: Conversion) -> TrainSettings:
    return TrainSettings.model_validate(parse_toml(made.text))


def value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part] if isinstance(tree, dict) else getattr(tree, part)
    return tree


OUTCOMES = """
OWN
    model.layers = 6: --num-layers 6
    model.hidden = 96: --hidden-size 96
    model.heads = 8: --num-attention-heads 8
    model.mlp_ratio = 1.5: --ffn-hidden-size 96
    model.context = 256: --max-position-embeddings 256
    model.positions = 'rotary': --position-embedding-type rope; --use-rotary-position-embeddings
    model.tie_embeddings = False: --untie-embeddings-and-output-weights
    model.dropout = 0.2: --hidden-dropout 0.2
    model.vocab_size = 1024; data.vocab_size = 1000: --vocab-size 1000
    model.vocab_size = 1000; data.vocab_size = 1000: --padded-vocab-size 1000
    model.kind = 'moe'; model.experts = 8: --num-experts 8
    parallel.tp = 2: --tensor-model-parallel-size 2
    parallel.cp = 2: --context-parallel-size 2
    parallel.pp = 2; ~parallel.schedule = '1f1b': --pipeline-model-parallel-size 2
    parallel.ampipe_degree = 4: --ampipe-degree 4
    model.layers = 2: --noop-layers 0,3
    parallel.recompute = 'full': --recompute-granularity full
    parallel.recompute = 'selective': --recompute-granularity selective
    training.global_batch = 24: --micro-batch-size 3
    training.global_batch = 48; parallel.microbatches = 3: --global-batch-size 48
    training.steps = 7: --train-iters 7
    data.sequence_length = 64; model.context = 64: --seq-length 64
    data.held_out_fraction = 0.1: --split 90,5,5
    training.seed = 7; data.seed = 7: --seed 7
    optimizer.lr = 0.0003: --lr 3e-4
    lr_schedule.min_lr_ratio = 0.1: --min-lr 1e-4
    lr_schedule.kind = 'constant': --lr-decay-style constant
    lr_schedule.warmup_steps = 9: --lr-warmup-iters 9
    lr_schedule.warmup_steps = 3: --lr-warmup-samples 33
    lr_schedule.warmup_steps = 5: --lr-warmup-fraction 0.05
    optimizer.betas = (0.8, 0.999): --adam-beta1 0.8
    optimizer.betas = (0.9, 0.95): --adam-beta2 0.95
    optimizer.eps = 1e-06: --adam-eps 1e-6
    optimizer.weight_decay = 0.0: --weight-decay 0
    optimizer.grad_clip_norm = 0.5: --clip-grad 0.5
    precision = 'bf16': --bf16
    training.eval_every = 50: --eval-interval 50
    training.eval_batches = 5: --eval-iters 5
    training.eval_every = 0: --eval-iters 0
    training.log_every = 1: --log-interval 1
    checkpoint.dir = 'my runs/a': --save 'my runs/a'
    checkpoint.every_steps = 20: --save-interval 20
    output.tensorboard = True: --tensorboard-dir logs
    not needed: --disable-bias-linear; --recompute-num-layers 2; --optimizer adam; --lr-decay-iters 100;
        --lr-decay-samples 1600; --kv-channels 16; --rotary-base 10000; --normalization LayerNorm;
        --norm-epsilon 1e-5; --init-method-std 0.02; --make-vocab-size-divisible-by 128;
        --moe-expert-capacity-factor 1.5; --expert-model-parallel-size 2; --sequence-parallel;
        --ampipe-degree 1; --use-nanopipe; --schedules-method dualpipev;
        --num-layers-per-virtual-pipeline-stage 1; --pipeline-model-parallel-layout 'EttttL';
        --tp-comm-overlap; --train-samples 100
    lacking: --lr-decay-iters 80; --lr-decay-samples 800; --fp16; --load a; --group-query-attention;
        --rotary-base 50000; --normalization RMSNorm; --norm-epsilon 1e-6; --init-method-std 0.006;
        --swiglu; --qk-layernorm; --add-qkv-bias; --split 100,0,0; --split 100
LLAMA
    model.config.num_hidden_layers = 6: --num-layers 6
    model.config.hidden_size = 96: --hidden-size 96
    model.config.num_attention_heads = 8; model.config.num_key_value_heads = 8: --num-attention-heads 8
    model.config.head_dim = 32: --kv-channels 32
    model.config.intermediate_size = 96: --ffn-hidden-size 96
    model.config.max_position_embeddings = 256: --max-position-embeddings 256
    model.config.rope_theta = 500000.0: --rotary-base 500000
    model.architecture = 'LlamaForCausalLM': --normalization RMSNorm
    model.config.rms_norm_eps = 1e-06: --norm-epsilon 1e-6
    model.kind = 'huggingface': --swiglu
    model.architecture = 'Qwen2ForCausalLM': --add-qkv-bias
    model.architecture = 'Qwen3ForCausalLM': --qk-layernorm
    model.config.tie_word_embeddings = False: --untie-embeddings-and-output-weights
    model.config.attention_dropout = 0.2: --attention-dropout 0.2
    model.config.initializer_range = 0.01: --init-method-std 0.01
    model.config.vocab_size = 1024: --vocab-size 1000
    model.config.num_local_experts = 8: --num-experts 8
    not needed: --no-position-embedding; --num-query-groups 2; --position-embedding-type rope;
        --hidden-dropout 0
    lacking: --hidden-dropout 0.1
LLAMA --num-query-groups 2
    model.config.num_key_value_heads = 2: --group-query-attention
MOE --moe-router-score-function sigmoid --moe-router-group-topk 2
    model.groups = 4: --moe-router-num-groups 4
    model.bias_rate = 0.001: --moe-router-enable-expert-bias
MOE --moe-router-score-function sigmoid --moe-router-num-groups 4
    model.top_groups = 2: --moe-router-group-topk 2
MOE --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    model.bias_rate = 0.01: --moe-router-bias-update-rate 0.01
LLAMA --group-query-attention
    model.config.num_key_value_heads = 2: --num-query-groups 2
MOE
    model.expert_ratio = 1.5: --ffn-hidden-size 96
    model.top_k = 3: --moe-router-topk 3
    model.expert_ratio = 0.5: --moe-ffn-hidden-size 32
    model.shared_experts = 2: --n-shared-experts 2
    model.dense_every = 4: --moe-layer-freq '([0]*1+[1]*3)'
    model.dense_every = 2: --moe-layer-freq [0,1]*2; --expert-interval 2
    model.dense_first = 2: --moe-layer-freq '([0]*2+[1]*2)'
    model.router = 'sigmoid': --moe-router-score-function sigmoid
    model.scaling = 2.5: --moe-router-topk-scaling-factor 2.5
    model.capacity_factor = 1.5: --moe-expert-capacity-factor 1.5
    model.capacity_factor = 1.0: --moe-model-type deepspeed_moe
    model.aux_weight = 0.02: --moe-aux-loss-coeff 0.02
    model.z_weight = 0.02: --moe-z-loss-coeff 0.02
    parallel.ep = 4: --expert-model-parallel-size 4
    parallel.recompute = 'selective': --recompute-activations; --recompute-activation-function;
        --recompute-norm; --moe-layer-recompute
    not needed: --expert-tensor-parallel-size 1; --moe-train-capacity-factor 1.5; --moe-layer-freq 1;
        --expert-interval 1; --expert-model-parallel-size 1; --use-pipe-experts
MIXTRAL
    model.config.intermediate_size = 96: --ffn-hidden-size 96
    model.architecture = 'Qwen3MoeForCausalLM': --qk-layernorm
    model.config.num_experts_per_tok = 3: --moe-router-topk 3
    model.config.intermediate_size = 32: --moe-ffn-hidden-size 32
    model.config.router_aux_loss_coef = 0.04; model.config.output_router_logits = True:
        --moe-aux-loss-coeff 0.02
    not needed: --disable-bias-linear; --moe-model-type megatron_moe; --moe-z-loss-coeff 0;
        --n-shared-experts 0; --moe-aux-loss-coeff 0
    lacking: --add-qkv-bias; --moe-expert-capacity-factor 1.5; --moe-model-type deepspeed_moe;
        --moe-z-loss-coeff 0.1; --n-shared-experts 1; --moe-shared-expert-intermediate-size 32;
        --moe-layer-freq [0,1,1,1]
OWN --hidden-dropout 0
    model.dropout = 0.0: --attention-dropout 0
    lacking: --attention-dropout 0.1
OWN --vocab-size 1000 --tensor-model-parallel-size 2
    model.vocab_size = 1002: --make-vocab-size-divisible-by 3
LLAMA --qk-layernorm
    model.config.num_experts = 8: --num-experts 8
MIXTRAL --qk-layernorm
    ~model.config.norm_topk_prob = False: --moe-router-topk 1
    ~model.config.norm_topk_prob = True: --moe-router-topk 2
    model.config.norm_topk_prob = False: --moe-router-pre-softmax
    model.config.moe_intermediate_size = 32: --moe-ffn-hidden-size 32
    model.config.mlp_only_layers = [1, 2]: --moe-layer-freq [1,0,0,1]
MOE --moe-ffn-hidden-size 32
    model.shared_experts = 2: --moe-shared-expert-intermediate-size 64
MOE --moe-model-type deepspeed_moe
    model.capacity_factor = 1.2: --moe-train-capacity-factor 1.2
    model.capacity_factor = 0.0: --moe-no-drop
    not needed: --moe-expert-capacity-factor 1.5
MOE --moe-aux-loss-coeff 0.1
    model.aux_weight = 0.0: --moe-router-load-balancing-type none
SHARED
    parallel.pipe_experts = True: --use-pipe-experts
    not needed: --pipe-experts-multi-data 2
SHARED --use-pipe-experts
    parallel.pipe_experts_multi_data = 3: --pipe-experts-multi-data 3
    not needed: --pipe-experts-multi-data 1
OWN --tensor-model-parallel-size 2
    parallel.sequence_parallel = True: --sequence-parallel
    parallel.split_ops = True: --tp-comm-overlap; --use-ascend-mc2; --use-ascend-coc
OWN --context-parallel-size 2
    parallel.cp_kind = 'ulysses': --context-parallel-algo ulysses_cp_algo; --cp-comm-type a2a
OWN --expert-model-parallel-size 1
    parallel.zero = 1: --use-distributed-optimizer
    parallel.zero = 3: --use-torch-fsdp2; --enable-zero3
    not needed: --use-megatron-fsdp; --num-distributed-optimizer-instances 2;
        --data-parallel-sharding-strategy optim; --torch-fsdp2-no-reshard-after-forward
OWN --use-torch-fsdp2
    parallel.zero = 2: --torch-fsdp2-no-reshard-after-forward
    not needed: --use-distributed-optimizer
OWN --data-parallel-sharding-strategy optim_grads
    parallel.zero = 2: --use-megatron-fsdp
OWN --use-megatron-fsdp --use-distributed-optimizer
    parallel.zero = 1: --data-parallel-sharding-strategy optim
    parallel.zero = 2: --data-parallel-sharding-strategy optim_grads
    parallel.zero = 3: --data-parallel-sharding-strategy optim_grads_params
    not needed: --data-parallel-sharding-strategy no_shard
OWN --use-distributed-optimizer
    parallel.dp_shard = 4: --num-distributed-optimizer-instances 2
    not needed: --num-distributed-optimizer-instances 1; --num-distributed-optimizer-instances 8
TWO --tensor-model-parallel-size 4
    not needed: --use-distributed-optimizer
TWO
    parallel.schedule = 'zb-h1': --use-nanopipe
    parallel.schedule = 'dualpipev': --schedules-method dualpipev
    parallel.virtual_stages = 2; parallel.schedule = 'interleaved-1f1b':
        --num-layers-per-virtual-pipeline-stage 1; --pipeline-model-parallel-layout 'Et|t|t|tL'
    parallel.schedule = 'interleaved-1f1b': --num-virtual-stages-per-pipeline-rank 2
    parallel.split = 'Et*3|tL': --pipeline-model-parallel-layout 'Et*3|tL'
    parallel.split = 'E|(t|)*4||L': --pipeline-model-parallel-layout 'E|(t|)*4||L'
    parallel.split = 'embedding,layer|layer*3,loss': --decoder-first-pipeline-num-layers 1;
        --num-layer-list 1,3
    parallel.split = 'embedding,layer*3|layer,loss': --decoder-last-pipeline-num-layers 1
    parallel.split = 'embedding|layer*4,loss': --standalone-embedding-stage
    model.layers = 3; parallel.split = 'embedding,layer*2|layer,loss': --noop-layers 3
    not needed: --num-layers-per-virtual-pipeline-stage 2; --num-virtual-stages-per-pipeline-rank 1;
        --microbatch-group-size-per-virtual-pipeline-stage 2
TWO --num-layers 3 --account-for-loss-in-pipeline-split
    parallel.virtual_stages = 2: --num-layers-per-virtual-pipeline-stage 1
TWO --num-layers 8
    parallel.virtual_stages = 4: --num-virtual-stages-per-pipeline-rank 4
TWICE
    parallel.microbatch_group = 2: --microbatch-group-size-per-virtual-pipeline-stage 2
    lacking: --use-nanopipe
    not needed: --num-layers-per-virtual-pipeline-stage 1
LLAMA --pipeline-model-parallel-size 4
    parallel.split = 'Et|ttt||L': --pipeline-model-parallel-layout 'Et|ttt||L'
TWO --pipeline-model-parallel-size 4
    parallel.split = 'embedding,layer|layer|layer|layer,loss': --decoder-first-pipeline-num-layers 1
    parallel.split = 'embedding|layer|layer|loss': --noop-layers 0,3
TWO --decoder-last-pipeline-num-layers 4
    parallel.split = 'embedding|layer*4,loss': --decoder-first-pipeline-num-layers 0
TWICE --num-layers 6
    parallel.split = 'embedding,layer*2|layer|layer*2|layer,loss': --decoder-last-pipeline-num-layers 2
TWO --num-layers 5
    parallel.split = 'embedding,layer*2|layer*3,loss': --account-for-embedding-in-pipeline-split
    parallel.split = 'embedding,layer*3|layer*2,loss': --account-for-loss-in-pipeline-split
TWICE --num-layers 6 --account-for-embedding-in-pipeline-split
    parallel.split = 'embedding,layer|layer*2|layer*2|layer,loss': --account-for-loss-in-pipeline-split
TWICE --num-layers 2 --account-for-embedding-in-pipeline-split
    parallel.split = 'embedding|layer|layer|loss': --account-for-loss-in-pipeline-split
TWICE --num-layers 8
    parallel.split = 'embedding,layer*2||layer*2|layer*2,loss': --noop-layers 2,3
DUAL --num-layers 8
    parallel.split = 'embedding,layer*2|layer*2|layer*2|layer,loss': --noop-layers 7
MOE --moe-layer-freq [0,0,1,1]
    ~model.dense_every = 3: --noop-layers 0
OWN --global-batch-size 96
    parallel.microbatches = 4: --micro-batch-size 3
MOE --expert-model-parallel-size 1
    lacking: --expert-tensor-parallel-size 2
FULL
    not needed: --recompute-method uniform; --recompute-norm
    lacking: --recompute-method block
FULL --recompute-method uniform
    not needed: --recompute-num-layers 1
    lacking: --recompute-num-layers 2
OWN --optimizer adam
    optimizer.name = 'SGD': --optimizer sgd
    not needed: --optimizer adam; --sgd-momentum 0.5; --lr-wsd-decay-style linear;
        --lr-wsd-decay-iters 2
OWN --optimizer sgd
    optimizer.options.momentum = 0.5: --sgd-momentum 0.5
OWN --lr-decay-style WSD --lr-wsd-decay-style linear
    lr_schedule.decay_steps = 2: --lr-wsd-decay-iters 2
OWN --lr-wsd-decay-style linear --lr-wsd-decay-iters 2
    lr_schedule.kind = 'wsd': --lr-decay-style WSD
OWN --lr-decay-style constant
    not needed: --lr-decay-iters 80; --min-lr 0
OWN --save a
    not needed: --load a
OWN --num-query-groups 4
    not needed: --group-query-attention
LLAMA --add-qkv-bias
    lacking: --kv-channels 32
MOE --expert-model-parallel-size 2
    lacking: --use-pipe-experts
MIXTRAL --expert-model-parallel-size 2
    lacking: --use-pipe-experts
MOE --use-pipe-experts
    not needed: --pipe-experts-multi-data 2
DUAL
    not needed: --use-nanopipe; --num-layers-per-virtual-pipeline-stage 1;
        --num-virtual-stages-per-pipeline-rank 4; --microbatch-group-size-per-virtual-pipeline-stage 2
TWO --pipeline-model-parallel-layout 'Et|tttL'
    not needed: --num-layer-list 2,2
TWO --decoder-last-pipeline-num-layers 1
    not needed: --account-for-loss-in-pipeline-split
OWN --lr-warmup-fraction 0.1
    not needed: --lr-warmup-iters 5
OWN --eval-iters 0
    not needed: --eval-interval 5
SAMPLES
    training.steps = 10: --train-samples 165
"""
"""A command begins with a name of BASES. Below it, indented: what a flag becomes there, and such flags. That
is settings (~: other flags make it, too), or that it is not needed or lacking."""


def cases() -> list[tuple[str, str, str, str]]:
    """The rest of a command, a flag, its value and what becomes of it."""
    found, rest = [], ""
    for line in OUTCOMES.strip().replace("\n        ", " ").split("\n"):
        if line.startswith(" "):
            outcomes, flags = line.strip().split(": ", 1)
            pairs = [(flag, outcome) for flag in flags.split("; ") for outcome in outcomes.split("; ")]
            found += [(rest, *flag.partition(" ")[::2], outcome) for flag, outcome in pairs]
        else:
            base, _, more = line.partition(" ")
            rest = f"{BASES[base]} {more}"
    return found


def test_every_taken_flag_has_a_case() -> None:
    assert {name for _, name, _, _ in cases()} == {row.name for row in ROWS if row.fate == "taken"}


@pytest.mark.parametrize(("rest", "name", "given", "outcome"), cases())
def test_what_becomes_of_a_taken_flag(rest: str, name: str, given: str, outcome: str) -> None:
    made = convert([rest, f"{name} {given}"], ranks=8)
    tree = settings(made)
    (found,) = [one for one in made.outcomes if one.flag.split()[0] == name and one.what != AGAIN]
    key, equals, literal = outcome.partition(" = ")
    if not equals:
        assert found.fate == outcome
        assert len(found.what) > 8
        assert (f"{outcome}: {found.flag}: {found.what}" in made.text) == (outcome == "lacking")
        return
    got, expected = value(tree, key.removeprefix("~")), ast.literal_eval(literal)
    assert got == (pytest.approx(expected) if isinstance(expected, float) else expected)
    assert type(got) is type(expected)
    assert found.fate == "taken"
    assert key.startswith("~") or f"{key} = " in found.what


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
    assert len(rows) > 12
    with pytest.raises(UsageError) as refused:
        convert([MOE, *map(written, rows)], ranks=8)
    assert str(refused.value).split("\n") == [f"{written(row)}: {row.why}" for row in rows]


def test_an_idle_value_is_not_needed() -> None:
    rows = [row for row in ROWS if row.fate != "taken" and row.takes != "nothing" and row.default is not None]
    made = convert([MOE, *(f"{row.name} {row.default}" for row in rows)], ranks=8)
    idle = [one for one in made.outcomes if one.what == "with this value it does nothing"]
    assert [one.flag for one in idle] == [f"{row.name} {row.default}" for row in rows]
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
            wrong += [([row.name, "1.5"], "expected an integer"), ([f"{row.name}="], "expected an integer")]
        if row.takes == "float":
            wrong += [([row.name, "x"], "expected a number"), ([row.name, "nan"], "expected a number")]
        if isinstance(row.takes, tuple):
            wrong += [([row.name, "wrong"], f"{row.name} wrong: expected {' or '.join(row.takes)}")]
        for words, said in wrong:
            found = read_arguments(words)
            assert row.name not in found.given
            assert len(found.refused) == 1
            assert said in found.refused[0]

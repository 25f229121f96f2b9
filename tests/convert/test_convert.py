"""Command lines as users have them become settings that `stretto train` reads; faults name their flags."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.config import GPTSettings, HuggingFaceSettings, MoESettings, TrainSettings, load_settings
from stretto.convert.megatron import Conversion, convert
from stretto.errors import UsageError
from stretto.files.parse import parse_toml
from stretto.models.build import build_model
from stretto.train.optimizer import make_optimizer
from tests.convert.commands import AMPIPE, GPT3_175B, MIXTRAL_8X7B, table

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
    "--train-iters 100 --lr 1e-3"
)
TWO, TWICE = "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"


def read(made: Conversion, folder: Path) -> TrainSettings:
    """As `stretto train` reads them."""
    path = folder / "made.toml"
    path.write_text(made.text, encoding="utf-8")
    return load_settings(path)


def fates(made: Conversion) -> dict[str, str]:
    return {one.flag.split()[0]: one.fate for one in made.outcomes}


def test_gpt3_of_175_billion_is_the_example_of_this_repository(tmp_path: Path) -> None:
    made = convert([table(GPT3_175B), "--bf16 --vocab-size 50257"])
    found = read(made, tmp_path)
    ours = load_settings(Path(__file__).parents[2] / "examples" / "gpt3_175b.toml")
    assert isinstance(found.model, GPTSettings)
    assert isinstance(ours.model, GPTSettings)
    same = {"layers", "hidden", "heads", "context", "vocab_size", "positions", "mlp_ratio", "kind"}
    assert found.model.model_dump(include=same) == ours.model.model_dump(include=same)
    assert (found.model.tie_embeddings, found.model.dropout) == (True, 0.1)
    layout = ours.parallel.model_copy(update={"sequence_parallel": False})
    assert found.parallel == layout
    assert (found.parallel.world, found.parallel.microbatches) == (1024, 192)
    assert (found.training.global_batch, found.training.steps) == (1536, 500_000)
    assert found.lr_schedule.warmup_steps == 430
    assert found.lr_schedule.min_lr_ratio == pytest.approx(0.1)
    assert found.optimizer.betas == (0.9, 0.95)
    assert found.optimizer.lr == 6e-5
    assert found.data.held_out_fraction == pytest.approx(0.051)
    assert (str(found.checkpoint_dir), found.checkpoint.every_steps) == ("/ckpt", 10_000)
    assert found.precision == "bf16"
    lacking = {one.flag.split()[0] for one in made.of("lacking")}
    assert lacking == {
        "--data-path",
        "--vocab-file",
        "--rampup-batch-size",
        "--init-method-std",
        "--fp16",
        "--lr-decay-iters",
    }
    assert fates(made)["--load"] == "not needed"
    assert made.of("unknown") == []


def test_mixtral_8x7b(tmp_path: Path) -> None:
    made = convert([MIXTRAL_8X7B])
    found = read(made, tmp_path)
    assert isinstance(found.model, HuggingFaceSettings)
    assert found.model.architecture == "MixtralForCausalLM"
    assert found.model.config == {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "initializer_range": 0.01,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": pytest.approx(0.01 * 32 / 2),
        "vocab_size": 32000,
    }
    layout = found.parallel
    assert (layout.tp, layout.pp, layout.dp, layout.ep, layout.microbatches) == (1, 4, 8, 8, 32)
    assert found.precision == "bf16"
    become = fates(made)
    assert become["--sequence-parallel"] == "not needed"  # one tensor-parallel rank
    assert become["--overlap-grad-reduce"] == become["--overlap-param-gather"] == "not needed"
    assert (layout.zero, layout.dp_shard, become["--use-distributed-optimizer"]) == (1, None, "taken")
    assert become["--num-layers-per-virtual-pipeline-stage"] == "not needed"  # all 8 of a rank
    assert (layout.schedule, layout.virtual_stages, layout.split) == ("1f1b", None, "auto")
    assert "--moe-grouped-gemm" not in become  # a comment
    assert made.of("unknown") == []


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "auto"),
        ("--cp-comm-type p2p", "ring"),
        ("--cp-comm-type all_gather", "gathered"),
        ("--cp-comm-type a2a", "ulysses"),
        ("--context-parallel-algo megatron_cp_algo", "ring"),
        ("--context-parallel-algo ulysses_cp_algo", "ulysses"),
        ("--context-parallel-algo hybrid_cp_algo", "auto"),
    ],
)
def test_ranks_that_share_the_sequence(tmp_path: Path, flags: str, kind: str) -> None:
    made = convert([SMALL, f"--context-parallel-size 4 {flags}"], ranks=8)
    layout = read(made, tmp_path).parallel
    assert (layout.dp, layout.cp, layout.cp_kind) == (2, 4, kind)
    if "hybrid" in flags:
        assert fates(made)["--context-parallel-algo"] == "lacking"


def test_ampipe_and_pipe_experts_of_mindspeed(tmp_path: Path) -> None:
    made = convert([AMPIPE])
    found = read(made, tmp_path)
    assert isinstance(found.model, MoESettings)
    assert (found.model.experts, found.model.top_k, found.model.capacity_factor) == (4, 2, 1.1)
    assert (found.model.aux_weight, found.model.z_weight) == (0.01, 0.001)
    layout = found.parallel
    assert (layout.dp, layout.ep, layout.tp, layout.pp, layout.microbatches) == (16, 2, 1, 1, 2)
    assert (layout.ampipe_degree, layout.ampipe_capacity) == (2, "chunk")
    assert (layout.pipe_experts, layout.pipe_experts_multi_data) == (True, 4)
    assert layout.recompute == "full"
    assert fates(made)["--ampipe-tp-sp-comm-overlap"] == "not needed"
    assert fates(made)["--recompute-method"] == "lacking"
    assert made.of("unknown") == []


def test_ranks_that_share_the_state_of_experts_too(tmp_path: Path) -> None:
    flags = "--num-experts 8 --expert-model-parallel-size 4 --use-megatron-fsdp"
    shares = "--data-parallel-sharding-strategy optim_grads_params --num-distributed-optimizer-instances"
    layout = read(convert([SMALL, flags, f"{shares} 2"], ranks=16), tmp_path).parallel
    assert (layout.zero, layout.dp, layout.dp_shard, layout.ep) == (3, 16, 8, 4)
    with pytest.raises(UsageError, match=r"--num-distributed-optimizer-instances 8.*multiple of ep = 4"):
        convert([SMALL, flags, f"{shares} 8"], ranks=16)


def test_an_sgd_that_pytorch_takes(tmp_path: Path) -> None:
    made = convert([SMALL, "--optimizer sgd --adam-eps 1e-7"], ranks=1)
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    (group,) = make_optimizer(parameters, read(made, tmp_path).optimizer).param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.01)
    assert fates(made)["--adam-eps"] == "lacking"


def test_unknown_flags_are_listed_with_the_nearest() -> None:
    made = convert([f"{SMALL} --num-layer 5 6 --zzz=1 stray", "--frobnicate"], ranks=1)
    assert [(one.flag, one.what) for one in made.of("unknown")] == [
        ("--num-layer 5 6", "the nearest known is --num-layers"),
        ("--zzz=1", "no known flag is near"),
        ("stray", "the word belongs to no flag"),
        ("--frobnicate", "no known flag is near"),
    ]
    assert "# unknown: --num-layer 5 6: the nearest known is --num-layers" in made.text


def test_values_with_equals_blanks_and_minus(tmp_path: Path) -> None:
    made = convert([f"{SMALL} --seed=7 --save '/my runs/a \"b\"#c' --adam-eps=1e-6"], ranks=1)
    found = read(made, tmp_path)
    assert (found.training.seed, found.checkpoint.dir, found.optimizer.eps) == (7, '/my runs/a "b"#c', 1e-6)
    with pytest.raises(UsageError) as refused:
        convert([f"{SMALL} --weight-decay -0.1 --seed -3 --clip-grad=-1e-3"], ranks=1)
    assert str(refused.value).split("\n") == [
        "--seed -3: data.seed = -3: input should be greater than or equal to 0",
        "--weight-decay -0.1: optimizer.weight_decay = -0.1: input should be greater than or equal to 0",
        "--clip-grad=-1e-3: optimizer.grad_clip_norm = -0.001: input should be greater than or equal to 0",
        "--seed -3: training.seed = -3: input should be greater than or equal to 0",
    ]


def test_the_last_of_a_flag_counts(tmp_path: Path) -> None:
    made = convert([f"{SMALL} --lr 1", "--lr 2e-3 --num-layers 6"], ranks=1)
    found = read(made, tmp_path)
    assert found.optimizer.lr == 2e-3
    assert [one.flag for one in made.outcomes if one.what == "the flag is given again"] == [
        "--lr 1e-3",
        "--lr 1",
        "--num-layers 4",
    ]


FAULTS = r"""
--num-experts 8 --expert-model-parallel-size 3 --tensor-model-parallel-size 1 => parallel: ep = 3 takes
--num-experts 7 --expert-model-parallel-size 2 => --num-experts 7, --expert-model-parallel-size 2:
--num-attention-heads 5 => --hidden-size 64, --num-attention-heads 5: model: hidden = 64 must be a
--pipeline-model-parallel-size 8 => --num-layers 4, --pipeline-model-parallel-size 8: parallel.pp = 8
--max-position-embeddings 64 => --max-position-embeddings 64, --seq-length 128: data.sequence_length =
--ampipe-degree 100 => --ampipe-degree 100, --seq-length 128: parallel.ampipe_degree = 100 cuts
--num-experts 8 --moe-router-topk 9 => --moe-router-topk 9: model: top_k = 9 must not be above
--hidden-dropout 1 => --hidden-dropout 1: model.dropout = 1.0: input should be less than 1
--lr 0 => --lr 0: optimizer.lr = 0.0: input should be greater than 0
--min-lr 1 => --min-lr 1, --lr 1e-3: lr_schedule.min_lr_ratio = 1000.0: input should be less
--vocab-size 10 => --vocab-size 10: data.vocab_size = 10: input should be greater
--split 10,90 => --split 10,90: data.held_out_fraction = 0.9: input should be less
--save '' => --save '': checkpoint.dir = '': string should have at least 1 character
--enable-zero3 --num-distributed-optimizer-instances 3 => append --num-distributed-optimizer-instances 2
--global-batch-size 20 => append --global-batch-size 16
--global-batch-size 3 => append --global-batch-size 16
--micro-batch-size 0 => --micro-batch-size 0: expected an integer from 1 on
--hidden-size=-4 => --hidden-size=-4: expected an integer from 1 on
--kv-channels 32 => append --kv-channels 16
--position-embedding-type none => append --position-embedding-type rope or learned_absolute
--no-position-embedding => append --position-embedding-type rope
--optimizer muon => append --optimizer adam, or sgd
--lr-decay-style WSD --lr-wsd-decay-iters 2 => append --lr-wsd-decay-style linear
--lr-decay-style inverse-square-root => append --lr-decay-style cosine
--lr-warmup-fraction 2 => --lr-warmup-fraction 2: expected a number from 0 to 1
--split a,b => --split a,b: expected up to three shares
--num-experts 4 --moe-layer-freq 2 => append --moe-layer-freq 1, or a list such as '([0]*1+[1]*3)'
--num-experts 4 --moe-layer-freq [1]*9 => expected a number from 1 on, or a list of 0 and 1
--num-experts 4 --moe-layer-freq [1]*999999999 => expected a number from 1 on, or a list of 0 and 1
--num-experts 4 --moe-layer-freq __import__ => expected a number from 1 on, or a list of 0 and 1
--num-experts 4 --moe-shared-expert-intermediate-size 300 => append --moe-shared-expert-intermediate-size
--num-experts 4 --moe-aux-loss-coeff x => --moe-aux-loss-coeff x: expected a number
--num-experts 4 --moe-router-load-balancing-type sinkhorn => append --moe-router-load-balancing
TWO --num-layers-per-virtual-pipeline-stage 4 => append --num-layers-per-virtual-pipeline-stage 2
TWO --num-layers 3 --num-layers-per-virtual-pipeline-stage 1 => layout 'embedding,layer*2|layer,loss'
TWO --num-layer-list 1,1,2 => append --pipeline-model-parallel-layout 'embedding,layer*2|layer*2,
TWO --decoder-first-pipeline-num-layers 5 => 4 layers cannot be shared out so by 2 pipeline ranks
TWO TWICE --account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split => 'embedding,layer|
TWO --pipeline-model-parallel-layout 'Et|tL' => append --pipeline-model-parallel-layout 'embedding,
TWO --pipeline-model-parallel-layout 'Ettt|tmL' => no layers that predict further tokens
TWO --pipeline-model-parallel-layout 'Ettt|t|L' => which must be a multiple of pp = 2: make them 4
TWO --noop-layers 4 => --noop-layers 4: expected numbers of some layers, from 0 to 3
--noop-layers 0,1,2,3 => expected numbers of some layers, from 0 to 3
--make-vocab-size-divisible-by 0 --vocab-size 300 => --make-vocab-size-divisible-by 0: expected 1
--hidden-size $H => what $H is, the text does not say; give the command as the process got it
"""
"""Flags behind SMALL => what is said: the tree's own errors with the flags that made them, or what
Megatron's own check would say and what to append."""


@pytest.mark.parametrize(("given", "said"), [row.split(" => ") for row in FAULTS.strip().split("\n")])
def test_faults_name_the_flag_and_what_to_do(given: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        convert([SMALL, given.replace("TWO", TWO).replace("TWICE", TWICE)], ranks=8)
    assert said in str(refused.value)


def test_all_that_is_missing_is_said_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        convert(["--bf16"])
    lines = str(refused.value).split("\n")
    for name in (
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
        "--train-iters",
        "--lr",
    ):
        assert sum(line.startswith(f"{name} is missing; append {name}") for line in lines) == 1, name
    assert sum("--world" in line for line in lines) == 1
    assert len(lines) == 8


def test_ranks_are_given_or_of_the_launcher_or_of_the_table(tmp_path: Path) -> None:
    launched = f"torchrun --nproc_per_node 2 --nnodes 2 pretrain_gpt.py {SMALL}"
    printed = table(GPT3_175B, world_size=256)
    for text, ranks, dp in ((launched, None, 4), (launched, 8, 8), (printed, None, 2), (printed, 128, 1)):
        assert read(convert([text], ranks=ranks), tmp_path).parallel.dp == dp
    with pytest.raises(UsageError, match="--world N"):
        convert([SMALL])


def test_what_is_not_utf8_is_refused() -> None:
    with pytest.raises(UsageError, match="not UTF-8"):
        convert([f"{SMALL} --save \udcff"], ranks=1)


@pytest.mark.parametrize("value", ['a "b" \\ c', "\x7f\t\n", "é ☃ 𝄞 \ue000", "a'", '"'])
def test_texts_are_read_back(value: str, tmp_path: Path) -> None:
    assert read(convert([SMALL, shlex.join(["--save", value])], ranks=1), tmp_path).checkpoint.dir == value


GATED = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-3 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--ffn-hidden-size 48 --group-query-attention --num-query-groups 2 --rotary-base 500000 "
    "--norm-epsilon 1e-6 --hidden-dropout 0 --attention-dropout 0 --vocab-size 300 "
    "--make-vocab-size-divisible-by 8"
)
QWEN = "Qwen3MoeForCausalLM"
WITH_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01"


def built(*texts: str) -> tuple[str, Any]:
    settings = TrainSettings.model_validate(parse_toml(convert([GATED, *texts], ranks=1).text))
    assert isinstance(settings.model, HuggingFaceSettings)
    with torch.device("meta"):
        return settings.model.architecture, build_model(settings.model, settings.data.vocab_size, seed=0)


def shape(model: Any, name: str) -> tuple[int, ...]:
    return tuple(dict(model.named_parameters())[name].shape)


@pytest.mark.parametrize(
    ("more", "architecture", "biases"),
    [
        ("--disable-bias-linear", "LlamaForCausalLM", set()),
        (
            "",
            "LlamaForCausalLM",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
        ("--disable-bias-linear --add-qkv-bias", "Qwen2ForCausalLM", {"q_proj", "k_proj", "v_proj"}),
        ("--disable-bias-linear --qk-layernorm --kv-channels 16", "Qwen3ForCausalLM", set()),
        (f"--disable-bias-linear {WITH_EXPERTS}", "MixtralForCausalLM", set()),
        (
            f"--disable-bias-linear --qk-layernorm --kv-channels 16 {WITH_EXPERTS}",
            "Qwen3MoeForCausalLM",
            set(),
        ),
    ],
)
def test_they_can_be_built_with_what_the_flags_say(more: str, architecture: str, biases: set[str]) -> None:
    pytest.importorskip("transformers")
    name, model = built(more)
    assert name == architecture
    config = model.config
    assert config.rms_norm_eps == 1e-6
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    assert rope["rope_theta"] == 500000.0
    assert config.tie_word_embeddings
    assert len(model.model.layers) == 3
    assert shape(model, "model.embed_tokens.weight") == (304, 32)
    dims = 16 if "--kv-channels" in more else 8
    assert shape(model, "model.layers.0.self_attn.k_proj.weight") == (2 * dims, 32)
    assert shape(model, "model.layers.0.self_attn.q_proj.weight") == (4 * dims, 32)
    names = [name for name, _ in model.named_parameters()]
    assert {name.split(".")[-2] for name in names if name.endswith(".bias")} == biases
    assert any("q_norm" in name for name in names) == ("--qk-layernorm" in more)
    if "--num-experts" in more:
        assert config.output_router_logits
        assert shape(model, "model.layers.0.mlp.experts.down_proj") == (4, 32, 24)
    else:
        assert shape(model, "model.layers.0.mlp.up_proj.weight") == (48, 32)


def test_dense_blocks_of_a_qwen() -> None:
    pytest.importorskip("transformers")
    _, model = built(f"--disable-bias-linear --qk-layernorm {WITH_EXPERTS} --moe-layer-freq [0,1,1]")
    assert shape(model, "model.layers.0.mlp.up_proj.weight") == (48, 32)
    assert shape(model, "model.layers.1.mlp.experts.down_proj") == (4, 32, 24)


def test_the_balancing_loss_weighs_what_megatrons_weighs() -> None:
    """Megatron adds, for each block, coefficient x experts x the sum over experts of their share of choices
    times their mean probability. Blocks route alike here, so that transformers' one loss can be compared."""
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    _, model = built(f"--disable-bias-linear {WITH_EXPERTS}")
    tokens, experts, top_k, blocks, coefficient = 50, 4, 2, 3, 0.01
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probability = logits.softmax(dim=-1)
    chosen = torch.bincount(logits.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    share = chosen / (tokens * top_k)
    megatron = blocks * coefficient * experts * (share * probability.mean(dim=0)).sum()
    theirs = load_balancing_loss_func((logits,) * blocks, experts, top_k)
    torch.testing.assert_close(model.config.router_aux_loss_coef * theirs, megatron, check_dtype=False)

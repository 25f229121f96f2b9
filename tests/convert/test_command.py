"""Commands as processes got them, and the table that Megatron prints; shell text is refused."""

from __future__ import annotations

import pytest

from stretto.convert.command import read_command
from stretto.errors import UsageError
from tests.convert.commands import GPT3_175B, table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--a 1 'b c' --d=\"e f\" g\\ h", ["--a", "1", "b c", "--d=e f", "g h"]),
        ("# a comment\n\n--a 1 \\\n  --b 2\\\n\n  # --c 3 \\\n--d 4\n", ["--a", "1", "--b", "2", "--d", "4"]),
        ("--moe-layer-freq ([0]*1+[1]*3)", ["--moe-layer-freq", "([0]*1+[1]*3)"]),
        ("python\0-u\0x.py\0--num-layers\0002\0--save\0a $b\0", ["--num-layers", "2", "--save", "a $b"]),
        ("", []),
        ("  \n# only a comment", []),
    ],
)
def test_words_are_those_that_the_process_got(text: str, words: list[str]) -> None:
    assert list(read_command(text).words) == words


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=2 x.py --num-layers 2", 16),
        ("torchrun --nproc-per-node=4 x.py --num-layers 2", 4),
        ("/opt/bin/torchrun --nproc_per_node gpu x.py --num-layers 2", None),
        ("root 71 1 99 /usr/bin/python3 -m torch.distributed.run --nproc_per_node 2 x.py --num-layers 2", 2),
        ("torchrun --nproc_per_node 2 -m megatron.train --num-layers 2", 2),
        ("deepspeed --num_gpus 8 --num_nodes 3 x.py --num-layers 2", 24),
        ("torchrun --nnodes 1:4 --nproc_per_node 2 x.py --num-layers 2", None),
        ("starting\n+ python x.py --num-layers 2\nbuilding model", None),
        ("--num-layers 2\n--hidden-size 4", None),
    ],
)
def test_the_launcher_says_the_ranks(text: str, ranks: int | None) -> None:
    found = read_command(text)
    assert found.ranks == ranks
    assert found.words[:2] == ("--num-layers", "2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--num-layers $N", r"\$N is, the text does not say; .* `ps"),
        ("torchrun ${ARGS[@]} x.py --num-layers 2", r"\$\{ARGS"),
        ("--num-layers `nproc`", "`nproc`"),
        ("--save 'a", "close the quote"),
        ("torchrun x.py --num-layers 2 | tee log", r"\| is for a shell"),
        ("--num-layers 2 2>&1", "2>&1 is for a shell"),
        ("--num-layers 2; --bf16", "2; is for a shell"),
        ("--num-layers 2 # --bf16", "a comment is behind flags"),
        ("bash -c 'torchrun x.py --num-layers 2'", "within quotes"),
        ("python a.py --num-layers 2\npython b.py --num-layers 2", "2 training commands"),
        ("run.sh", "--megatron-file"),
        (table({"num_layers": 2}).replace("end of", "END"), "has no end"),
        (table({"num_layers": 2}) * 2, "two tables"),
    ],
)
def test_texts_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_command(text)


def test_the_table_of_arguments_is_read() -> None:
    found = read_command(table(GPT3_175B, untie_embeddings_and_output_weights=True))
    assert found.ranks == 1024
    text = " ".join(found.words)
    for flags in (
        "--num-layers 96",
        "--tensor-model-parallel-size 8",
        "--rampup-batch-size 16 16 5859375",
        "--untie-embeddings-and-output-weights",
        "--fp16",
    ):
        assert flags in text
    # Not given, of no use here, Megatron's own, or counting beside another alone.
    for name in (
        "vocab-size",
        "num-experts",
        "moe-router-topk",
        "seed",
        "bf16",
        "add-qkv-bias",
        "fp8-margin",
    ):
        assert f"--{name}" not in found.words


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"add_bias_linear": False}, "--disable-bias-linear"),
        ({"add_position_embedding": False}, "--no-position-embedding"),
        ({"add_bias_linear": False, "add_qkv_bias": True}, "--add-qkv-bias"),
        ({"fp8": "hybrid"}, "--fp8-format hybrid"),
        ({"num_experts": 8, "moe_layer_freq": [0, 1]}, "--moe-layer-freq [0, 1]"),
        ({"num_experts": 8, "moe_aux_loss_coeff": [0.1, 0.2]}, "--moe-aux-loss-coeff 0.1 0.2"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"microbatch_group_size_per_vp_stage": 4}, "--microbatch-group-size-per-virtual-pipeline-stage 4"),
    ],
)
def test_arguments_that_are_called_otherwise_than_their_flags(changed: dict[str, object], flag: str) -> None:
    assert flag in " ".join(read_command(table(GPT3_175B, **changed)).words)
    assert flag not in " ".join(read_command(table(GPT3_175B)).words)

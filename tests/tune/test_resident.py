"""Memory as it is estimated, beside that of plans: within a tenth, whatever copies keep in parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stretto.config import TrainSettings
from stretto.tune.block import TuneBlock
from stretto.tune.choices import Candidate, Dealt, LayoutChoice
from stretto.tune.estimate import estimate
from stretto.tune.work import Asked, Planned, TuneWork
from tests.cells import slow
from tests.clusters import cores

NEAR = 0.10

CLUSTER = cores(peak_tflops=400.0, memory_gbps=3000.0, link_gbps=200.0, op_overhead_us=2.0, latency_us=5.0)
"""About an accelerator, without a limit of memory: nothing stays full for longer than it must."""

SHAPE = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
LLAMA = {
    "kind": "huggingface",
    "architecture": "LlamaForCausalLM",
    "config": {**SHAPE, "num_hidden_layers": 4, "intermediate_size": 3584},
}
MIXTURE = {
    "kind": "huggingface",
    "architecture": "MixtralForCausalLM",
    "config": {
        **SHAPE,
        "num_hidden_layers": 2,
        "intermediate_size": 2048,
        "num_local_experts": 8,
        "output_router_logits": False,
    },
}
WORDS = ("none", "full")


def settings(model: Mapping[str, Any], batch: int) -> TrainSettings:
    given = {
        "model": model,
        "data": {"sequence_length": 2048, "vocab_size": 32000},
        "precision": "bf16",
        "training": {"global_batch": batch},
        # Pairs keep more: estimates are of the least that a step needs, which has none.
        "parallel": {"overlap": "local"},
    }
    return TrainSettings.model_validate(given)


@pytest.mark.parametrize(
    ("model", "layout", "virtual_stages"),
    [
        (LLAMA, LayoutChoice(1, 8, 1, 1, False, 2), 1),
        (LLAMA, LayoutChoice(2, 4, 1, 1, False, 4), 1),
        slow(LLAMA, LayoutChoice(1, 8, 1, 1, False, 1), 1),
        slow(LLAMA, LayoutChoice(1, 4, 1, 2, True, 2), 1),
        slow(LLAMA, LayoutChoice(2, 4, 1, 1, False, 4), 2),
        slow(LLAMA, LayoutChoice(4, 2, 1, 1, False, 8), 1),
        slow(MIXTURE, LayoutChoice(1, 8, 4, 1, False, 2), 1),
        slow(MIXTURE, LayoutChoice(2, 4, 2, 1, False, 4), 1),
    ],
)
def test_memory_is_estimated_within_a_tenth(
    tmp_path: Path, model: Mapping[str, Any], layout: LayoutChoice, virtual_stages: int
) -> None:
    work = TuneWork(settings(model, layout.pieces), 8, CLUSTER, {})
    family = "1f1b" if virtual_stages == 1 else "interleaved-1f1b"
    found: dict[str, float] = {}
    for zero in (0, 1, 2, 3):
        bare = Candidate(layout, family, virtual_stages, dealt=Dealt(zero))
        block = work.do(Asked(bare, None, WORDS, (layout.pp * virtual_stages,)))
        assert isinstance(block, TuneBlock), block
        for word in WORDS:
            candidate = Candidate(layout, family, virtual_stages, word, Dealt(zero))
            guessed = estimate(candidate, block, block.again[word], CLUSTER)
            made = work.do(Asked(candidate, "list"))
            assert isinstance(made, Planned), made
            found[str(candidate)] = guessed.peak_bytes / max(made.made.peak_bytes)
    print("\n".join(f"{times:.3f} {name}" for name, times in found.items()))
    assert all(abs(times - 1) <= NEAR for times in found.values()), found

"""Training under every layout gives what one process gives, and goes on from any other layout's checkpoints.

The runs of `RUNS` are trained once, those of one number of ranks by processes that are started once; a test
then looks at what they left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.launch import launch
from tests.train.tiny import GPT, LLAMA, steps_of, train, write_settings
from torch.distributed.checkpoint.filesystem import FileSystemReader

from stretto.capturing import capture
from stretto.config import Parallel, load_settings
from stretto.models.build import build_model, huggingface_sum
from stretto.train.checkpoint import load_model
from stretto.train.export import export

STEPS, HALF = 8, 4
TOLERANCE = 1e-5
"""Relative, of losses in float32 over these steps: reductions are grouped otherwise."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
"""Continuous integration trains over tp in its main job."""

MODELS = {
    "gpt": GPT.replace("dropout = 0.1", "tie_embeddings = true"),
    "drop": GPT,
    "moe": GPT.replace('"gpt"', '"moe"').replace("dropout = 0.1", "experts = 4")
    + "expert_ratio = 1.0\ncapacity_factor = 0.0\n",
    "llama": LLAMA,
    "two heads of keys": LLAMA.replace("num_attention_heads = 2", "num_attention_heads = 4")
    + "num_key_value_heads = 2\n",
    "mixtral": LLAMA.replace("Llama", "Mixtral").replace("tie_word_embeddings = true", "")
    + 'num_key_value_heads = 2\nnum_local_experts = 4\nexperts_implementation = "batched_mm"\n',
}
TP, TP_SEQUENCE, PP = (
    "tp = 2\nmicrobatches = 2",
    "tp = 2\nsequence_parallel = true\nmicrobatches = 2",
    "pp = 2\nmicrobatches = 2",
)
ONE, DP = "microbatches = 2", "dp = 2\nmicrobatches = 1"
ZERO = f"{DP}\nzero = 1"
EP = "dp = 2\nep = 2\nep_buffer = 2.0\nmicrobatches = 2"
EP_OF_FOUR = "dp = 4\nep_buffer = 4.0\nmicrobatches = 1"


@dataclass(frozen=True)
class LayoutRun:
    """source: the run at whose checkpoint of half the steps this one begins."""

    model: str
    ranks: int
    layout: str
    source: str = ""
    steps: int = STEPS


RUNS = {
    "gpt": LayoutRun("gpt", 1, ONE),
    "gpt-tp": LayoutRun("gpt", 2, TP_SEQUENCE),
    "gpt-dp": LayoutRun("gpt", 2, DP, "gpt-tp"),
    "gpt-pp": LayoutRun("gpt", 2, PP, "gpt-tp"),
    "gpt-nothing-on-one": LayoutRun("gpt", 2, f'{PP}\nsplit = "embedding,layer*2,loss|"', "gpt-tp"),
    "gpt-one-of-tp": LayoutRun("gpt", 1, ONE, "gpt-tp"),
    "drop-tp": LayoutRun("drop", 2, TP),
    "drop-tp-of-tp": LayoutRun("drop", 2, TP, "drop-tp"),
    "gpt-zero": LayoutRun("gpt", 2, ZERO),
    "gpt-zero-pp": LayoutRun("gpt", 4, f"pp = 2\n{ZERO}", "gpt-zero"),
    "gpt-zero-tp": LayoutRun("gpt", 4, f"tp = 2\nsequence_parallel = true\n{ZERO}", "gpt-zero"),
    "gpt-zero-of-tp": LayoutRun("gpt", 2, ZERO, "gpt-tp"),
    "gpt-copies-of-zero": LayoutRun("gpt", 2, DP, "gpt-zero"),
    "gpt-one-of-zero": LayoutRun("gpt", 1, ONE, "gpt-zero"),
    "gpt-zero-in-groups": LayoutRun("gpt", 4, "dp = 4\nmicrobatches = 1\nzero = 1\ndp_shard = 2", "gpt-zero"),
    "drop-zero": LayoutRun("drop", 2, ZERO),
    "drop-zero-of-zero": LayoutRun("drop", 2, ZERO, "drop-zero"),
    "llama": LayoutRun("llama", 1, ONE, steps=HALF),
    "llama-tp": LayoutRun("llama", 2, TP_SEQUENCE, steps=HALF),
    "keys": LayoutRun("two heads of keys", 1, ONE),
    "keys-four": LayoutRun("two heads of keys", 4, "tp = 4\nsequence_parallel = true\nmicrobatches = 2"),
    "keys-pp-tp": LayoutRun("two heads of keys", 4, "pp = 2\ntp = 2\nmicrobatches = 2", "keys-four"),
    "keys-four-of-one": LayoutRun("two heads of keys", 4, "tp = 4\nmicrobatches = 2", "keys"),
    # Four microbatches of a row in every layout, since routers' losses are of a microbatch.
    "moe": LayoutRun("moe", 1, "microbatches = 4"),
    "moe-two": LayoutRun("moe", 2, EP),
    "moe-four": LayoutRun("moe", 4, f"ep = 4\n{EP_OF_FOUR}", "moe-two"),
    "moe-pairs": LayoutRun("moe", 4, f"ep = 2\n{EP_OF_FOUR}", "moe-two"),
    "moe-tp": LayoutRun("moe", 4, f"tp = 2\nsequence_parallel = true\nampipe_degree = 2\n{EP}", "moe-two"),
    "moe-one-of-two": LayoutRun("moe", 1, "microbatches = 4", "moe-two"),
    "mixtral": LayoutRun("mixtral", 1, "microbatches = 4", steps=HALF),
    "mixtral-two": LayoutRun("mixtral", 2, EP, steps=HALF),
}
"""The first of each model is of one process, and what the others are compared with."""


def write(folder: Path, name: str) -> None:
    run = RUNS[name]
    # Of a GPT it is a setting of its own, of a model of transformers the last table is its configuration.
    table = MODELS[run.model] + "vocab_size = 302\n"
    path = write_settings(folder, run=name, steps=run.steps, every=HALF, table=table, layout=run.layout)
    if run.source:
        resume = f'keep = 9\nresume = "{checkpoint(folder, run.source, HALF)}"'
        path.write_text(path.read_text().replace("keep = 9", resume))


def checkpoint(folder: Path, name: str, step: int) -> Path:
    return folder / name / "checkpoints" / f"step-{step:06d}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, done: those that begin at others' checkpoints last. `copies.json` has, by run, how many
    parameters had the same bits on rank 0 and others."""
    folder = tmp_path_factory.mktemp("layouts")
    copies: dict[str, int] = {}
    for goes_on in (False, True):
        for ranks in (1, 2, 4):
            names = [n for n, r in RUNS.items() if r.ranks == ranks and bool(r.source) == goes_on]
            for name in names:
                write(folder, name)
                if ranks == 1:
                    train(folder / f"{name}.toml")
            if ranks > 1 and names:
                out, *_ = launch(ranks, "tests.train.layouts", str(folder), *names, within_s=1000.0)
                lines = [line.split() for line in out.splitlines() if " copies " in line]
                copies |= {words[0]: int(words[2]) for words in lines}
    (folder / "copies.json").write_text(json.dumps(copies))
    return folder


def lines(folder: Path, name: str, key: str = "loss") -> dict[int, float]:
    return {step: line[key] for step, line in steps_of(folder / name).items()}


def reference(name: str) -> str:
    return next(one for one, run in RUNS.items() if run.model == RUNS[name].model)


@pytest.mark.parametrize("name", [name for name in RUNS if reference(name) != name])
def test_the_steps_are_those_of_one_process(folder: Path, name: str) -> None:
    if RUNS[name].model == "drop":  # which draws other numbers on each layout
        if not RUNS[name].source:
            return
        for key in ("loss", "grad_norm"):
            expected = lines(folder, RUNS[name].source, key)
            assert lines(folder, name, key) == {step: v for step, v in expected.items() if step > HALF}
        return
    first = HALF if RUNS[name].source else 0
    for key in ("loss", "lr") if RUNS[name].source else ("loss", "lr", "grad_norm"):
        expected = {s: value for s, value in lines(folder, reference(name), key).items() if s > first}
        assert len(expected) == RUNS[name].steps - first
        assert lines(folder, name, key) == pytest.approx(expected, rel=TOLERANCE)
    held_out = [
        json.loads((folder / one / "summary.json").read_text())["held_out_loss"]
        for one in (name, reference(name))
    ]
    assert held_out[0] == pytest.approx(held_out[1], rel=TOLERANCE)


@pytest.mark.parametrize("layout", ["tp", "zero"])
def test_resuming_under_the_same_layout_changes_no_bit(folder: Path, layout: str) -> None:
    names = f"drop-{layout}", f"drop-{layout}-of-{layout}"
    one, two = (load_model(checkpoint(folder, run, STEPS))[0] for run in names)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_what_ranks_have_copies_of_stays_the_same_bit_for_bit(folder: Path) -> None:
    """`tests.train.layouts` compares them."""
    copies = json.loads((folder / "copies.json").read_text())
    norms = 2 * 2 * 2 + 2  # of two layers, gain and bias, and the last
    assert copies["gpt-tp"] == copies["drop-tp"] == norms
    assert copies["gpt-dp"] > norms  # everything
    assert copies["gpt-pp"] == 1  # the tied embedding
    assert copies["gpt-nothing-on-one"] == 0
    assert copies["keys-four"] > 0
    # With all four ranks sharing experts, each expert is on one rank; with pairs, on two.
    assert copies["moe-pairs"] > copies["moe-four"] > 0


def test_a_checkpoint_has_a_shared_head_of_keys_once(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    stored = FileSystemReader(checkpoint(folder, "keys-four", HALF)).read_metadata().state_dict_metadata
    for key in (f"model.{name}", f"optimizer.{name}.exp_avg"):
        chunks = stored[key].chunks  # type: ignore[union-attr]
        assert sorted(tuple(chunk.offsets) for chunk in chunks) == [(0, 0), (8, 0)]


def test_a_checkpoint_of_parts_names_nothing_of_them(folder: Path) -> None:
    """The same tensors in the same shapes as of one process, in other pieces; no part twice."""
    one, parts = (
        FileSystemReader(checkpoint(folder, run, HALF)).read_metadata().state_dict_metadata
        for run in ("gpt", "gpt-zero")
    )
    assert one.keys() == parts.keys()
    for key, stored in one.items():
        assert getattr(stored, "size", None) == getattr(parts[key], "size", None), key
    pieces = [
        parts[f"optimizer.blocks.0.mlp.up.weight.{state}"].chunks for state in ("exp_avg", "exp_avg_sq")
    ]  # type: ignore[union-attr]
    for chunks in pieces:
        assert sorted((tuple(c.offsets), tuple(c.sizes)) for c in chunks) == [
            ((0, 0), (64, 32)),
            ((64, 0), (64, 32)),
        ]


@pytest.mark.parametrize(
    "name", ["gpt-tp", "gpt-zero", "gpt-zero-pp", "llama-tp", "keys-four", "moe-two", "mixtral-two"]
)
def test_an_exported_model_has_the_weights_of_one_process(folder: Path, tmp_path: Path, name: str) -> None:
    """What was learned is compared, not where it began: Adam moves a weight by about its rate each step."""
    exported = []
    for one in (reference(name), name):
        export(folder / one, tmp_path / one)
        exported.append(load_file(tmp_path / one / "model.safetensors"))
    assert exported[0].keys() == exported[1].keys()
    if "mixtral" not in name:  # whose files have other names than its modules
        settings = load_settings(folder / f"{name}.toml")
        start = build_model(settings.model, 302, settings.training.seed).state_dict()
        for key, tensor in exported[0].items():
            moved = tensor - start[key]
            assert float(moved.norm()) > 1e-3 * float(tensor.norm())
            assert float((exported[1][key] - tensor).norm()) < 1e-4 * float(moved.norm()), key
    if name.startswith(("llama", "mixtral")):
        transformers = pytest.importorskip("transformers")
        more = {"experts_implementation": "batched_mm"} if name.startswith("mixtral") else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, **more)
        one, two = (load_model(checkpoint(folder, run, HALF))[0] for run in (reference(name), name))
        tokens = torch.arange(16)[None]
        assert torch.equal(model(tokens).logits, two(tokens).logits)
        assert torch.allclose(model(tokens).logits, one(tokens).logits, rtol=1e-3, atol=1e-4)
        if name.startswith("mixtral"):  # its experts are shared again
            batch = {"input_ids": tokens.repeat(2, 1), "labels": tokens.repeat(2, 1)}
            job = capture(model, batch, huggingface_sum, Parallel(dp=2, ep=2))
            assert {shard.axis for parameter in job.parameters for shard in parameter.shards} == {"ep"}

"""GPT and the building of models: causal, deterministic, and equal to what the textbook formulas say."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.equality import huggingface_loss
from torch import Tensor, nn

from stretto.config import GPTSettings, HuggingFaceSettings
from stretto.config.pretrained import unknown_keys
from stretto.errors import UsageError
from stretto.models.build import (
    END_OF_TEXT_ID,
    build_model,
    counted_loss_function,
    huggingface_sum,
    shapes_alone,
)
from stretto.models.gpt import GPT, GPTConfig, generate, next_token_loss, next_token_sum, rotate
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum

TINY = GPTConfig(vocab_size=61, layers=3, hidden=24, heads=3, context=16)
LEARNED = GPTConfig(vocab_size=61, layers=3, hidden=24, heads=3, context=16, positions="learned")
TIED = GPTConfig(vocab_size=61, layers=1, hidden=24, heads=3, context=16, tie_embeddings=True)
LLAMA = HuggingFaceSettings(
    kind="huggingface",
    architecture="LlamaForCausalLM",
    config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
)


def some_tokens(batch: int = 2, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [TINY, LEARNED], ids=lambda config: config.positions)
def test_a_later_token_never_changes_earlier_logits(config: GPTConfig) -> None:
    model = GPT(config).double()
    tokens = some_tokens()
    before = model(tokens)
    for place in range(16):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 61
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-12)
        assert (after[:, place] - before[:, place]).abs().max() > 1e-3


def test_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    turned_q, turned_k = (rotate(x.expand(1, 1, 12, 8))[0, 0] for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(12))
    scores = turned_q @ turned_k.T
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (scores[0, 0] - scores[0, 5]).abs() > 1e-3


def test_attention_is_softmax_of_scaled_scores() -> None:
    model = GPT(LEARNED).double()
    attention = model.blocks[1].attention
    x = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    heads = attention.qkv(x)[0].view(5, 3, 3, 8)  # (S, H, which, K)
    parts = []
    for head in range(3):
        q, k, v = heads[:, head].unbind(1)
        scores = (q @ k.T / math.sqrt(8)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        parts.append(scores.softmax(dim=-1) @ v)
    torch.testing.assert_close(attention(x)[0], attention.out(torch.cat(parts, dim=-1)))


def test_the_loss_is_that_of_the_next_token_and_starts_near_ignorance() -> None:
    model = GPT(TINY).double()
    tokens = some_tokens(length=17)
    log_probability = model(tokens[:, :-1]).log_softmax(dim=-1)
    by_hand = -torch.stack(
        [log_probability[b, s, tokens[b, s + 1]] for b in range(2) for s in range(16)]
    ).mean()
    loss = next_token_loss(model, tokens)
    torch.testing.assert_close(loss, by_hand)
    assert loss.dtype == torch.float64
    assert abs(loss.item() - math.log(61)) < 0.1
    as_dict = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    assert torch.equal(next_token_loss(model, as_dict), loss)


def test_the_loss_is_in_float32_for_a_bfloat16_model() -> None:
    assert next_token_loss(GPT(TINY).bfloat16(), some_tokens(length=17)).dtype == torch.float32


def test_the_seed_decides_the_weights_and_dtype_does_not_change_them() -> None:
    first, again, other = GPT(TINY, seed=1), GPT(TINY, seed=1), GPT(TINY, seed=2)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == ("norm" in name), name
    double = GPT(TINY, seed=0).double()
    double.init_weights(1)
    assert all(torch.equal(a.double(), b) for a, b in zip(first.parameters(), double.parameters()))


def test_residual_branches_start_smaller() -> None:
    model = GPT(GPTConfig(vocab_size=8, layers=8, hidden=128, heads=4, context=8))
    block = model.blocks[3]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(128))
    assert torch.equal(model.norm.bias, torch.zeros(128))


@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_a_model_on_meta_gets_its_values_later(config: GPTConfig) -> None:
    with torch.device("meta"):
        model, last = GPT(config, seed=3), GPT(config, seed=3)
        assert model(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 61)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu").init_weights(3)
    assert (model.head.weight is model.embedding.weight) is config.tie_embeddings
    assert torch.equal(model(some_tokens()), GPT(config, seed=3)(some_tokens()))
    # A rank of its own may keep the head alone; it gets what the model has elsewhere.
    last.head.to_empty(device="cpu")
    last.init_weights(3)
    assert last.embedding.weight.is_meta
    assert torch.equal(last.head.weight, model.head.weight)


def test_a_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied, untied = (GPT(TIED.model_copy(update={"tie_embeddings": tie})).double() for tie in (True, False))
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        next_token_loss(model, some_tokens()).backward()
    assert tied.head.weight is tied.embedding.weight
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, expected, rtol=1e-10, atol=1e-12)


def test_dropout_acts_while_training_only() -> None:
    model = GPT(TINY.model_copy(update={"dropout": 0.5}))
    assert not torch.equal(model(some_tokens()), model(some_tokens()))
    model.eval()
    assert torch.equal(model(some_tokens()), model(some_tokens()))


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="hidden = 25 must be a multiple of heads = 3"):
        GPTConfig(vocab_size=8, layers=1, hidden=25, heads=3, context=8)
    with pytest.raises(ValueError, match="must be even"):
        GPTConfig(vocab_size=8, layers=1, hidden=9, heads=3, context=8)
    with pytest.raises(ValueError, match="17 tokens is longer than the context of 16"):
        GPT(TINY)(some_tokens(length=17))


def test_a_gpt_learns_a_pattern_and_continues_it() -> None:
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pattern = torch.tensor([7, 3, 9, 1, 5]).repeat(5)
    batch = torch.stack([pattern[start : start + 17] for start in range(5)])
    for _ in range(60):
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.3
    # 20 new tokens are more than the context has, so that the prompt is cropped on the way.
    continued = generate(model, pattern[:5], 20, temperature=0)
    assert continued.tolist() == pattern.tolist()
    assert model.training


def test_sampling_follows_its_generator_and_temperature() -> None:
    model = GPT(TINY)
    prompt = some_tokens(length=3)

    def draw(seed: int) -> Tensor:
        return generate(model, prompt, 12, 1.0, torch.Generator().manual_seed(seed))

    assert draw(1).shape == (2, 15)
    assert torch.equal(draw(1)[:, :3], prompt)
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    with pytest.raises(ValueError, match="temperature"):
        generate(model, prompt, 1, -1.0)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, prompt[:, :0], 1)


def test_settings_become_a_gpt() -> None:
    settings = GPTSettings(layers=2, hidden=24, heads=3, context=16, positions="learned", mlp_ratio=2.0)
    model = build_model(settings, vocab_size=61, seed=4)
    assert isinstance(model, GPT)
    expected = GPTConfig(
        vocab_size=61, layers=2, hidden=24, heads=3, context=16, mlp_ratio=2.0, positions="learned"
    )
    assert model.config == expected
    assert torch.equal(model.head.weight, GPT(expected, 4).head.weight)
    assert counted_loss_function(settings) is next_token_sum
    wider = build_model(GPTSettings(layers=1, hidden=24, heads=3, vocab_size=64), 61, 0)
    assert isinstance(wider, GPT)
    assert wider.config.vocab_size == 64
    with pytest.raises(UsageError, match=r"model\.vocab_size = 60 is too small: the tokenizer has 61"):
        build_model(GPTSettings(vocab_size=60), 61, 0)


def test_settings_become_a_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    before = torch.random.get_rng_state()
    model = build_model(LLAMA, 61, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    again = build_model(LLAMA, 61, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.bos_token_id, model.config.eos_token_id) == (END_OF_TEXT_ID, END_OF_TEXT_ID)
    tokens = some_tokens(length=17)
    loss = huggingface_loss(model, tokens)
    # transformers shifts labels itself: over one token more, it measures the same 16 predictions.
    torch.testing.assert_close(loss, model(input_ids=tokens, labels=tokens).loss)
    assert generate(model, tokens[:, :4], 3, context=32).shape == (2, 7)


def test_a_mixture_of_experts_keeps_its_balancing_loss() -> None:
    pytest.importorskip("transformers")
    settings = HuggingFaceSettings(
        kind="huggingface",
        architecture="MixtralForCausalLM",
        config={**LLAMA.config, "num_local_experts": 2, "output_router_logits": True},
    )
    model = build_model(settings, 61, seed=0)
    tokens = some_tokens(length=17)
    model.config.router_aux_loss_coef = 0.5
    large = huggingface_loss(model, tokens)
    model.config.router_aux_loss_coef = 0.0
    small = huggingface_loss(model, tokens)
    assert large.item() > small.item() + 0.5
    model.config.router_aux_loss_coef = 0.5
    assert_sums_are_the_means(huggingface_sum, huggingface_loss, model)
    # An evaluation measures what the model shows of text alone.
    torch.testing.assert_close(huggingface_loss(model.eval(), tokens), small)
    assert_sums_are_the_means(huggingface_sum, huggingface_loss, model)


def assert_sums_are_the_means(summed: Any, mean: Any, model: nn.Module) -> None:
    """For plain tokens, and for labels of which some do not count."""
    tokens = some_tokens(length=17)
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] % 3 == 0, -100)
    some = int((labels != -100).sum())
    assert 0 < some < labels.numel()
    for batch, counted in ((tokens, labels.numel()), ({"input_ids": tokens[:, :-1], "labels": labels}, some)):
        total, count = summed(model, batch)
        assert count == counted
        torch.testing.assert_close(total / count, mean(model, batch))


def test_a_training_takes_sums_with_their_counts() -> None:
    settings = GPTSettings(layers=1, hidden=24, heads=3, context=16)
    assert counted_loss_function(settings) is next_token_sum
    assert_sums_are_the_means(next_token_sum, next_token_loss, GPT(TINY))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75, "rope_theta": 1e4}),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4}),
        ("Qwen3ForCausalLM", {"rope_scaling": None, "max_window_layers": 2, "sliding_window": None}),
    ],
)
def test_keys_that_a_configuration_class_asks_for_are_known(
    architecture: str, config: dict[str, object]
) -> None:
    transformers = pytest.importorskip("transformers")
    assert unknown_keys(getattr(transformers, architecture), config) == []


NAME = "LlamaForCausalLM"
REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("LlamaForCasualLM", {}, "no such model; did you mean 'LlamaForCausalLM'"),
    ("LlamaConfig", {}, "has no such model"),
    ("BertModel", {}, "does not predict the next token"),
    (NAME, {"name_or_path": "x/y"}, r"name_or_path changes nothing .* give model\.pretrained"),
    (NAME, {"_name_or_path": "x/y"}, r"_name_or_path changes nothing .* give model\.pretrained"),
    (NAME, {"torch_dtype": "bfloat16"}, "torch_dtype changes nothing .* give precision"),
    (NAME, {"quantization_config": {}}, "quantization_config changes nothing"),
    (NAME, {"vocab_size": 60}, r"model\.config\.vocab_size = 60 is too small"),
    (NAME, {"hiden_size": 60}, r"hiden_size: .* did you mean 'hidden_size'\?"),
    (NAME, {"hidden_size": "wide"}, r"model\.config: LlamaForCausalLM cannot be built"),
    (NAME, {**LLAMA.config, "rope_theta": "wide"}, r"model\.config: LlamaForCausalLM cannot be built"),
    (NAME, {"rope_theta": 1e5, "rope_teta": 1e5}, r"model\.config\.rope_teta: LlamaConfig has no"),
    (NAME, {"model_type": "llama", "rope_teta": 1e5}, r"(?s)model_type changes nothing.*rope_teta"),
]


@pytest.mark.parametrize(("architecture", "config", "expected"), REFUSED)
def test_a_model_of_transformers_that_cannot_be(
    architecture: str, config: dict[str, object], expected: str
) -> None:
    pytest.importorskip("transformers")
    settings = HuggingFaceSettings(kind="huggingface", architecture=architecture, config=config)
    with pytest.raises(UsageError, match=expected):
        build_model(settings, 61, 0)


@pytest.mark.parametrize("settings", [GPTSettings(kind="gpt", layers=2, hidden=32, heads=2), LLAMA])
def test_shapes_alone_are_those_of_the_model_on_meta(settings: GPTSettings | HuggingFaceSettings) -> None:
    def described() -> list[tuple[str, Any]]:
        model = build_model(settings, 61, 0)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return [(name, (x.shape, x.stride(), x.dtype, x.device.type, x.requires_grad)) for name, x in named]

    with torch.device("meta"):
        want = described()
    with shapes_alone():
        assert described() == want
        # What has values is drawn as always.
        own = nn.init.normal_(torch.zeros(99, device="cpu"), generator=torch.Generator().manual_seed(1))
    drawn = torch.empty(99).normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(own, drawn)


def test_without_transformers_the_user_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'stretto\[hf\]'"):
        build_model(LLAMA, 61, 0)


def test_an_evaluation_leaves_out_the_losses_of_routers() -> None:
    config = MoEConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=8, experts=4, z_weight=0.1)
    model = MoEGPT(config, seed=1)
    batch = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(2))
    output = model(batch[:, :-1])
    plain = F.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten())
    routers = config.aux_weight * output.losses[0] + config.z_weight * output.losses[1]
    for trains, want in ((True, plain + routers), (False, plain)):
        total, count = moe_token_sum(model.train(trains), batch)
        torch.testing.assert_close(total / count, want)

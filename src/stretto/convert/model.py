"""The flags of the model: which kind it is, and its settings.

Stretto's own GPT is GPT-2's: layer norms, a GELU, as many heads of keys as of queries, but no biases in its
matrices. What has a gated MLP, RMS norms and rotary positions is a model of `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.convert.arguments import Tally
from stretto.convert.experts import ExpertFlags, experts_of, put_experts
from stretto.convert.layout import NOOP

OWN_DEVIATION, OWN_EPSILON, OWN_BASE = 0.02, 1e-5, 10000.0
"""Of `models.gpt`: its initial weights, its norms, its rotary positions."""
GATED = ("--swiglu", "--normalization")
COUNT = ("--num-experts",)
POSITIONS = ("--position-embedding-type", "--use-rotary-position-embeddings")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model. width: of a plain MLP. groups: heads of keys and values. longest: the
    flag that says the context."""

    layers: int
    hidden: int
    heads: int
    groups: int
    width: int
    context: int
    longest: str


def put_model(tally: Tally, real: Sequence[int]) -> ExpertFlags | None:
    """The table `[model]`, and the vocabulary of `[data]`. real: `layout.real_layers`."""
    hidden, heads = (tally.need(name) for name in ("--hidden-size", "--num-attention-heads"))
    rotary = _rotary(tally)
    gated = tally.get("--swiglu") and tally.get("--normalization") == "RMSNorm" and rotary
    groups = tally.need("--num-query-groups") if tally.get("--group-query-attention") else heads
    width = tally.get("--ffn-hidden-size")
    if width is None:  # Megatron's own choice
        width = int(4 * hidden * 2 / 3 / 64) * 64 if tally.get("--swiglu") else 4 * hidden
    longest = "--max-position-embeddings" if tally.is_given("--max-position-embeddings") else "--seq-length"
    context = tally.get(longest) or 1
    sizes = Sizes(len(real), hidden, heads, groups, max(width, 1), context, longest)
    experts = experts_of(tally, real, sizes.width)
    if gated:
        _put_transformers(tally, sizes, experts)
    else:
        _put_own(tally, sizes, experts, rotary)
    put_experts(tally, experts, sizes.hidden)
    _put_vocabulary(tally, "model.config.vocab_size" if gated else "model.vocab_size")
    return experts


def _rotary(tally: Tally) -> bool:
    kind = tally.get("--position-embedding-type")
    rotary = kind == "rope" or bool(tally.get("--use-rotary-position-embeddings"))
    if not rotary and kind != "learned_absolute":
        tally.refuse(
            "--position-embedding-type",
            "Stretto's models have rotary or learned positions; "
            "append --position-embedding-type rope or learned_absolute",
        )
    if tally.get("--no-position-embedding") and not rotary:
        tally.refused.append(
            "--no-position-embedding without rotary positions: a model of Stretto must know positions; "
            "append --position-embedding-type rope"
        )
    return rotary


def _put_own(tally: Tally, sizes: Sizes, experts: ExpertFlags | None, rotary: bool) -> None:
    tally.put("model.kind", "moe" if experts else "gpt", *COUNT[: experts is not None], why="Megatron's GPT")
    tally.put("model.layers", sizes.layers, "--num-layers", NOOP)
    tally.put("model.hidden", sizes.hidden, "--hidden-size")
    tally.put("model.heads", sizes.heads, "--num-attention-heads")
    tally.put("model.context", sizes.context, sizes.longest)
    tally.put("model.mlp_ratio", sizes.width / sizes.hidden, "--ffn-hidden-size", why="4 times hidden")
    tally.put("model.positions", "rotary" if rotary else "learned", *POSITIONS)
    untied = tally.get("--untie-embeddings-and-output-weights")
    tally.put("model.tie_embeddings", not untied, "--untie-embeddings-and-output-weights")
    _put_own_dropout(tally)
    wanted = "; --swiglu, --normalization RMSNorm and --position-embedding-type rope together make a Llama"
    tally.lack(f"Stretto's own GPT has a GELU{wanted}", "--swiglu")
    if tally.get("--normalization") == "RMSNorm":
        tally.lack(f"Stretto's own GPT has layer norms{wanted}", "--normalization")
    if sizes.groups < sizes.heads:
        names = ("--group-query-attention", "--num-query-groups")
        tally.lack(f"Stretto's own GPT has as many heads of keys as of queries{wanted}", *names)
    tally.lack(f"Stretto's own GPT has none{wanted}", "--add-qkv-bias", "--qk-layernorm")
    if not tally.get("--disable-bias-linear"):
        tally.absent.append(
            "without --disable-bias-linear Megatron's matrices have biases; here they have none"
        )
    _fixed(tally, "--norm-epsilon", OWN_EPSILON, "the epsilon of its norms is")
    _fixed(tally, "--init-method-std", OWN_DEVIATION, "the standard deviation of initial weights is")
    _fixed(tally, "--rotary-base", OWN_BASE, "the base of its rotary positions is")
    channels = tally.get("--kv-channels")
    if channels is not None and channels * sizes.heads != sizes.hidden:
        tally.refuse(
            "--kv-channels",
            "a head of Stretto's own GPT has --hidden-size / "
            f"--num-attention-heads = {sizes.hidden / sizes.heads:g} dims; append --kv-channels "
            f"{sizes.hidden // sizes.heads}",
        )


def _fixed(tally: Tally, name: str, own: float, what: str) -> None:
    if tally.get(name) != own:
        tally.lack(f"in Stretto's own GPT {what} {own:g}", name)


def _put_own_dropout(tally: Tally) -> None:
    hidden, attention = tally.get("--hidden-dropout"), tally.get("--attention-dropout")
    both = hidden == attention
    tally.put("model.dropout", hidden, "--hidden-dropout", *(["--attention-dropout"] if both else []))
    if not both:
        tally.lack(f"one probability for all: that of --hidden-dropout, {hidden:g}", "--attention-dropout")
        if not tally.is_given("--attention-dropout"):
            tally.absent.append(
                f"without --attention-dropout Megatron drops {attention:g} of it; here --hidden-dropout, "
                f"{hidden:g}, is for both"
            )


def _put_transformers(tally: Tally, sizes: Sizes, experts: ExpertFlags | None) -> None:
    bias, norms = tally.get("--add-qkv-bias"), tally.get("--qk-layernorm")
    if experts is None:
        name = "Qwen3ForCausalLM" if norms else "Qwen2ForCausalLM" if bias else "LlamaForCausalLM"
    else:
        name = "Qwen3MoeForCausalLM" if norms else "MixtralForCausalLM"
    key = "model.config."
    tally.put("model.kind", "huggingface", *GATED)
    tally.put("model.architecture", name, *GATED, *COUNT[: experts is not None])
    tally.put(f"{key}hidden_size", sizes.hidden, "--hidden-size")
    tally.put(f"{key}num_hidden_layers", sizes.layers, "--num-layers", NOOP)
    tally.put(f"{key}num_attention_heads", sizes.heads, "--num-attention-heads")
    grouped = ("--group-query-attention", "--num-query-groups")
    heads_of_keys = grouped if tally.get(grouped[0]) else ("--num-attention-heads",)
    tally.put(f"{key}num_key_value_heads", sizes.groups, *heads_of_keys)
    tally.put(f"{key}max_position_embeddings", sizes.context, sizes.longest)
    channels = tally.get("--kv-channels")
    if name == "Qwen2ForCausalLM":
        if channels is not None and channels * sizes.heads != sizes.hidden:
            tally.lack(f"a head of {name} has hidden / heads dims", "--kv-channels")
    else:
        dims = channels or sizes.hidden // sizes.heads
        tally.put(f"{key}head_dim", dims, "--kv-channels", why="hidden / heads")
    tally.put(f"{key}rms_norm_eps", tally.get("--norm-epsilon"), "--norm-epsilon")
    tally.put(f"{key}rope_theta", tally.get("--rotary-base"), "--rotary-base")
    tally.put(f"{key}initializer_range", tally.get("--init-method-std"), "--init-method-std")
    untied = tally.get("--untie-embeddings-and-output-weights")
    tally.put(f"{key}tie_word_embeddings", not untied, "--untie-embeddings-and-output-weights")
    tally.put(f"{key}attention_dropout", tally.get("--attention-dropout"), "--attention-dropout")
    if experts is None:
        tally.put(f"{key}intermediate_size", sizes.width, "--ffn-hidden-size")
    dropped = tally.get("--hidden-dropout")
    if dropped:
        tally.lack(f"{name} drops nothing outside attention", "--hidden-dropout")
        if not tally.is_given("--hidden-dropout"):
            tally.absent.append(f"without --hidden-dropout Megatron drops {dropped:g}; {name} drops nothing")
    if norms:
        tally.put("model.architecture", name, "--qk-layernorm")
    _put_biases(tally, name, bias)


def _put_biases(tally: Tally, name: str, bias: bool) -> None:
    if bias and name == "Qwen2ForCausalLM":
        tally.put("model.architecture", name, "--add-qkv-bias")
    else:
        tally.lack(f"{name} has no biases in attention alone", "--add-qkv-bias")
    if tally.get("--disable-bias-linear"):
        return
    if name == "LlamaForCausalLM":
        for key in ("attention_bias", "mlp_bias"):
            tally.put(f"model.config.{key}", True, "--disable-bias-linear")
    else:
        tally.absent.append(f"without --disable-bias-linear Megatron's matrices have biases; not so {name}'s")


def _put_vocabulary(tally: Tally, key: str) -> None:
    tokens, rows = tally.get("--vocab-size"), tally.get("--padded-vocab-size")
    divisor = tally.get("--make-vocab-size-divisible-by") * max(tally.get("--tensor-model-parallel-size"), 1)
    if tokens is None and rows is None:
        tally.absent.append(
            "without --vocab-size the embedding has as many rows as Stretto's tokenizer has tokens "
            "(data.vocab_size), which changes the model's size"
        )
        return
    if rows is None:
        if divisor < 1:
            tally.refuse("--make-vocab-size-divisible-by", "expected 1 or more")
            return
        rows = -(-tokens // divisor) * divisor
        tally.put(key, rows, "--vocab-size", "--make-vocab-size-divisible-by")
    else:
        tally.put(key, rows, "--padded-vocab-size")
    names = ("--vocab-size",) if tokens is not None else ("--padded-vocab-size",)
    tally.put("data.vocab_size", rows if tokens is None else tokens, *names)

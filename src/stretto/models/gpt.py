"""GPT: a decoder-only transformer, its next-token loss, and sampling from it.

The plain, single-process model; it knows nothing of stages, ranks or communication. It is what
Radford et al. (GPT-2, 2019) describe, with rotary positions (Su et al., 2021) as the other choice and
without biases in its matrices. It touches no file.

Dims of tensors, as suffixes:
  B batch   S sequence   D hidden   H heads   K dim of a head   M width of the MLP   V vocabulary
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.config import DecoderSettings
from stretto.errors import UsageError

INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2)."""
RESIDUAL = ("attention.out.weight", "mlp.down.weight", "shared.down.weight", "experts.down")
"""Ends of the names of the last matrices of residual branches."""
ROTARY_BASE = 10_000.0
"""Ratio of the longest to the shortest rotary wavelength (Su et al., 2021)."""


class GPTConfig(DecoderSettings):
    """The shape of a GPT: as in settings, with the rows of its embedding."""

    vocab_size: int


def rotate(x_BHSK: Tensor) -> Tensor:
    """Rotate pairs of the last dim by angles that grow with the position (rotary embedding, in halves).

    The angles are computed here, for each block again, and not kept as a table of the model: a few
    thousand cosines cost nothing beside a matmul, and a block that needs nothing but its input can be put
    on any stage, and can be built on the meta device.
    """
    S, K = x_BHSK.shape[-2:]
    precise = torch.float64 if x_BHSK.dtype == torch.float64 else torch.float32
    device = x_BHSK.device
    exponent = torch.arange(0, K, 2, device=device, dtype=precise) / K
    position = torch.arange(S, device=device, dtype=precise)
    angle_SK = torch.outer(position, ROTARY_BASE**-exponent)
    cos, sin = angle_SK.cos().to(x_BHSK.dtype), angle_SK.sin().to(x_BHSK.dtype)
    first, second = x_BHSK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention: (B, S, D) to (B, S, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.rotary = config.positions == "rotary"
        self.dropout = config.dropout
        # Head-major rows (H, 3, K): a shard of the rows is a shard of full heads.
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """mask_B1SS: which tokens see which, where that is not all that came before."""
        B, S, _ = x_BSD.shape
        qkv_BSHK = self.qkv(x_BSD).view(B, S, -1, 3 * self.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv_BSHK.split(self.head_dim, dim=-1))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        dropout = self.dropout if self.training else 0.0
        causal = mask_B1SS is None
        y_BHSK = F.scaled_dot_product_attention(q, k, v, mask_B1SS, dropout, is_causal=causal)
        y_BSD: Tensor = self.out(y_BHSK.transpose(1, 2).reshape(B, S, -1))
        return y_BSD


class MLP(nn.Module):
    """Two matrices with a GELU between: (B, S, D) to (B, S, D)."""

    def __init__(self, config: GPTConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.mlp_hidden if width is None else width
        self.up = nn.Linear(config.hidden, width, bias=False)
        self.down = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSM = F.gelu(self.up(x_BSD), approximate="tanh")
        y_BSD: Tensor = self.down(h_BSM)
        return y_BSD


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream: (B, S, D) to (B, S, D)."""

    def __init__(self, config: GPTConfig, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config) if mlp is None else mlp
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, *mask_B1SS: Tensor) -> Tensor:
        """mask_B1SS: as `Attention` takes it, where there is one."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), *mask_B1SS))
        y_BSD: Tensor = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return y_BSD


TP_PLAN = {
    "embedding": "vocabulary",
    "blocks.*.attention_norm": "sequence",
    "blocks.*.attention.qkv": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp_norm": "sequence",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "norm": "sequence",
    "head": "vocabulary",
}
"""How tensor-parallel ranks share a GPT (`parallelize.styles`): as in Megatron-LM, arXiv 1909.08053."""


class GPT(nn.Module):
    """Token ids (B, S) to logits (B, S, V).

    The same `seed` gives the same weights on every machine, device and rank. A model built under
    `torch.device("meta")` has shapes only; after `to_empty`, `init_weights(seed)` gives it its values.
    """

    tp_plan: ClassVar[Mapping[str, str]] = TP_PLAN

    def __init__(self, config: GPTConfig, seed: int = 0, blocks: Sequence[nn.Module] | None = None) -> None:
        """blocks: others than `Block`."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(blocks or [Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.init_weights(seed)

    def embedded(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """The input of the first block: (B, S, D). positions_BS: as in `forward`."""
        S = tokens_BS.shape[1]
        if self.config.context < S:
            raise ValueError(f"a sequence of {S} tokens is longer than the context of {self.config.context}")
        x_BSD = self.embedding(tokens_BS)
        if self.position is not None:
            x_BSD = x_BSD + self.position(
                torch.arange(S, device=tokens_BS.device) if positions_BS is None else positions_BS
            )
        embedded_BSD: Tensor = self.dropout(x_BSD)
        return embedded_BSD

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """positions_BS: of tokens in their documents, where a row has several, of which each begins at 0 and
        sees none of the others."""
        x_BSD, mask = self.embedded(tokens_BS, positions_BS), document_mask(positions_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, *mask)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Give every parameter its initial value (GPT-2: the residual branches' last matrices are smaller
        by the root of the number of branches). On the meta device there is nothing to give. Embeddings that
        `to_empty` has untied are tied again.

        Each parameter has a random stream of its own, made from the seed and its name, so that a rank that
        has a few of them gets the values that they have in the full model.
        """
        tied = self.config.tie_embeddings
        if tied and self.head.weight.device == self.embedding.weight.device:
            self.head.weight = self.embedding.weight
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if "norm." in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            std = residual_std if name.endswith(RESIDUAL) else INIT_STD
            # A rank may have the head alone, without the embedding that it is tied to.
            stream_name = "embedding.weight" if tied and name == "head.weight" else name
            digest = hashlib.sha256(f"{seed}:{stream_name}".encode()).digest()
            stream = torch.Generator(device="cpu").manual_seed(
                int.from_bytes(digest[:8], "little", signed=True)
            )
            # Drawn in float32 on the CPU, so that neither dtype nor device changes the values.
            parameter.copy_(torch.randn(parameter.shape, generator=stream, device="cpu") * std)


def document_mask(positions_BS: Tensor | None) -> tuple[Tensor, ...]:
    """What blocks are given besides their input: which tokens see which, (B, 1, S, S), those before them in
    their document, which begins where a position is 0. Nothing where there are no positions."""
    if positions_BS is None:
        return ()
    document_BS = (positions_BS == 0).cumsum(dim=-1)
    same_B1SS = document_BS[:, None, :, None] == document_BS[:, None, None, :]
    S = positions_BS.shape[-1]
    return (same_B1SS & torch.ones(S, S, dtype=torch.bool, device=positions_BS.device).tril(),)


IGNORED = -100
"""The target that does not count, as everywhere in PyTorch."""


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats, the mean or the "sum"; computed in float32 or finer. Targets of -100 do not
    count."""
    logits_BSV = logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def count_targets(batch: Tensor | Mapping[str, Tensor]) -> Tensor | int:
    """How many tokens of a batch (`inputs_and_targets`) count; of plain tokens all do."""
    _, targets_BS = inputs_and_targets(batch)
    return targets_BS.numel() if isinstance(batch, Tensor) else (targets_BS != IGNORED).sum()


def inputs_and_targets(batch: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The tokens that a model reads and those that it should predict next, both (B, S).

    `batch` is (B, S + 1) tokens, or has `input_ids` and `labels`, both (B, S), where labels[b, s] is the
    token after input_ids[b, s]: they are not shifted again.
    """
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.shape[1] < 2:
            raise UsageError(
                f"a batch of tokens is (sequences, tokens and one more), not "
                f"{tuple(batch.shape)}: give each sequence two tokens or more"
            )
        return batch[:, :-1], batch[:, 1:]
    return batch["input_ids"], batch["labels"]


def positions_of(batch: Tensor | Mapping[str, Tensor], name: str = "positions_BS") -> dict[str, Tensor]:
    """What a model is called with besides tokens: their positions, (B, S), under a name of its own, where the
    batch has `position_ids`, by which documents of a row are kept apart."""
    if isinstance(batch, Tensor) or "position_ids" not in batch:
        return {}
    return {name: batch["position_ids"]}


def next_token_loss(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The mean cross-entropy, in nats, of the next token; see `inputs_and_targets` for `batch`.

    `model` maps (B, S) tokens to (B, S, V) logits. Returns a scalar in float32 (float64 for such a model).
    """
    inputs_BS, targets_BS = inputs_and_targets(batch)
    return cross_entropy(model(inputs_BS, **positions_of(batch)), targets_BS)


def next_token_sum(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int]:
    """(sum, count) of what `next_token_loss` is the mean of, for steps whose parts count unequally."""
    inputs_BS, targets_BS = inputs_and_targets(batch)
    logits_BSV = model(inputs_BS, **positions_of(batch))
    return cross_entropy(logits_BSV, targets_BS, "sum"), count_targets(batch)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    n: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    context: int | None = None,
) -> Tensor:
    """Continue each prompt (B, S) or (S,) by `n` tokens; returns prompt and continuation.

    A `temperature` of 0 takes the likeliest token. The model sees the last `context` tokens; without it,
    `model.config.context` of them. Nothing is cached between tokens: it is meant for short samples. Also
    takes models that return an object with `.logits`, as those of `transformers` do.
    """
    if temperature < 0:
        raise ValueError(f"temperature = {temperature} must not be below 0")
    if prompt_ids.shape[-1] == 0:
        raise ValueError("the prompt is empty; start from at least one token")
    context = context if context is not None else int(getattr(model.config, "context"))  # noqa: B009
    tokens_BS = prompt_ids if prompt_ids.dim() == 2 else prompt_ids[None]
    was_training = model.training
    model.eval()
    try:
        for _ in range(n):
            output = model(tokens_BS[:, -context:])
            logits_BV = (output if isinstance(output, Tensor) else output.logits)[:, -1].float()
            if temperature == 0:
                next_B1 = logits_BV.argmax(dim=-1, keepdim=True)
            else:
                probability_BV = (logits_BV / temperature).softmax(dim=-1)
                next_B1 = torch.multinomial(probability_BV, 1, generator=generator)
            tokens_BS = torch.cat((tokens_BS, next_B1), dim=1)
    finally:
        model.train(was_training)
    return tokens_BS if prompt_ids.dim() == 2 else tokens_BS[0]

"""Settings of the model that is trained, by its kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from stretto.files.settings_file import Settings
from stretto.ir.limits import MOST_LAYERS


class PretrainedSettings(Settings):
    """What all kinds of models have in common."""

    pretrained: str | None = Field(default=None, min_length=1)
    """What the run starts from instead of fresh weights: a folder that `stretto export` or `save_pretrained`
    wrote, or a name of the Hugging Face Hub. It brings the kind and shape of the model, and its tokenizer:
    what else is given here must agree with it, or be free of it (dropout, keys of `config`)."""


class DecoderSettings(PretrainedSettings):
    """What Stretto's own transformers have in common."""

    vocab_size: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Rows of the embedding; without it, or with 0, as many as the tokenizer has tokens."""
    layers: int = Field(default=8, ge=1, le=MOST_LAYERS)
    """Transformer blocks."""
    hidden: int = Field(default=256, ge=1, le=2**20)
    """Width of the residual stream."""
    heads: int = Field(default=4, ge=1, le=2**20)
    """Attention heads; `hidden` is a multiple of it."""
    context: int = Field(default=256, ge=1, le=2**31 - 1)
    """The longest sequence in tokens; `data.sequence_length` is not above it."""
    mlp_ratio: float = Field(default=4.0, gt=0, le=2**10)
    """Width of the MLP over `hidden`; the width is 1 or more."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an activation while training."""
    tie_embeddings: bool = False
    """Whether the output layer uses the embedding's weight."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How a position is encoded: by rotating queries and keys, or by a learned vector."""

    @property
    def mlp_hidden(self) -> int:
        """Width of the MLP."""
        return round(self.hidden * self.mlp_ratio)

    @model_validator(mode="after")
    def _sizes_fit(self) -> DecoderSettings:
        if self.hidden % self.heads:
            raise ValueError(f"hidden = {self.hidden} must be a multiple of heads = {self.heads}")
        if self.positions == "rotary" and (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden / heads = {self.hidden // self.heads} must be even for positions = 'rotary'; "
                "change heads, or use positions = 'learned'"
            )
        if self.mlp_hidden < 1:
            raise ValueError(
                f"mlp_ratio = {self.mlp_ratio} of hidden = {self.hidden} makes an MLP of width 0; "
                f"give {1 / self.hidden:.3g} or more"
            )
        return self


class GPTSettings(DecoderSettings):
    """Stretto's own GPT (`stretto.models.gpt`)."""

    kind: Literal["gpt"] = "gpt"
    """Which kind of model this is."""


class MoESettings(DecoderSettings):
    """A GPT whose blocks have experts in place of one MLP (`stretto.models.moe`)."""

    kind: Literal["moe"]
    """Which kind of model this is."""
    experts: int = Field(default=8, ge=2, le=MOST_LAYERS)
    """Experts of a block."""
    top_k: int = Field(default=2, ge=1)
    """Experts that a token goes to. The weights of several sum to 1, the weight of one is its probability, as
    in Switch Transformers."""
    expert_ratio: float = Field(default=4.0, gt=0, le=2**10)
    """Width of an expert over `hidden`."""
    capacity_factor: float = Field(default=1.25, ge=0)
    """Tokens that an expert takes of a microbatch, over its even share; those beyond it are dropped. 0 is
    dropless: every token is served."""
    shared_experts: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """Experts that every token goes to, besides those that its router chooses."""
    dense_every: int = Field(default=0, ge=0)
    """One block in so many has a plain MLP, the first block first; 0 for none."""
    dense_first: int = Field(default=0, ge=0)
    """Blocks at the beginning that have a plain MLP."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How experts are scored: against each other, or each by itself, as in DeepSeek-V3. Of the second kind,
    those are chosen whose score with a bias is the best; weights are of scores alone."""
    bias_rate: float = Field(default=0.0, ge=0)
    """Of `router = "sigmoid"`: by how much the bias of an expert moves after each step, up where its load is
    below the mean and else down (DeepSeek-V3: 0.001). Then `aux_weight` may be 0."""
    scaling: float = Field(default=1.0, gt=0)
    """What weights of the chosen experts are multiplied by (DeepSeek-V3: 2.5)."""
    groups: int = Field(default=1, ge=1)
    """Of `router = "sigmoid"`: groups of neighbouring experts, on which a node may be (DeepSeek-V3: 8)."""
    top_groups: int = Field(default=1, ge=1)
    """Groups whose experts a token may choose (DeepSeek-V3: 4)."""
    aux_weight: float = Field(default=0.01, ge=0)
    """Weight of the loss that balances the experts' loads."""
    z_weight: float = Field(default=0.001, ge=0)
    """Weight of the loss that keeps routers' scores small."""

    @field_validator("capacity_factor", mode="before")
    @classmethod
    def _none_is_dropless(cls, given: Any) -> Any:
        return 0.0 if given is None else given

    @property
    def expert_hidden(self) -> int:
        """Width of an expert."""
        return round(self.hidden * self.expert_ratio)

    @model_validator(mode="after")
    def _experts_fit(self) -> MoESettings:
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} must not be above experts = {self.experts}")
        if self.expert_hidden < 1:
            raise ValueError(
                f"expert_ratio = {self.expert_ratio} of hidden = {self.hidden} makes experts of width 0; "
                f"give {1 / self.hidden:.3g} or more"
            )
        if self.router != "sigmoid" and (self.bias_rate or self.groups > 1):
            raise ValueError("bias_rate and groups are of router = 'sigmoid'; choose it, or leave them out")
        if self.experts % self.groups or not self.top_groups <= self.groups:
            raise ValueError(
                f"groups = {self.groups} must divide experts = {self.experts}, and top_groups = "
                f"{self.top_groups} must not be above groups"
            )
        if self.top_k > self.experts // self.groups * self.top_groups:
            raise ValueError(
                f"top_k = {self.top_k} is more than the experts of top_groups = {self.top_groups} of "
                f"groups = {self.groups}; give more top_groups"
            )
        if self.dense_first >= self.layers:
            raise ValueError(
                f"dense_first = {self.dense_first} leaves none of layers = {self.layers} with experts"
            )
        if self.dense_every and not any(n % self.dense_every for n in range(self.dense_first, self.layers)):
            raise ValueError(
                f"dense_every = {self.dense_every} leaves none of layers = {self.layers} with experts; give 0"
                + (" or 2" if self.layers > 1 else "")
            )
        return self


_OF_WEIGHTS = ("use_dora", "trainable_token_indices", "layer_replication")
"""Keys of an adapter with which `peft` takes values of full weights, or copies them, where it is made."""


class HuggingFaceSettings(PretrainedSettings):
    """A causal language model of `transformers`."""

    kind: Literal["huggingface"]
    """Which kind of model this is."""
    architecture: str = Field(min_length=1)
    """The model's class in `transformers`, such as "LlamaForCausalLM"; with `pretrained`, as that says."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's configuration class; `vocab_size` is the tokenizer's when it is absent. With
    `pretrained`, what is to differ from its configuration."""

    adapter: dict[str, Any] | None = None
    """A low-rank adapter, which alone is trained: arguments of `peft.LoraConfig`, such as `r`, `lora_alpha`,
    `target_modules`. It needs `pretrained`."""

    @model_validator(mode="after")
    def _adapts_weights(self) -> HuggingFaceSettings:
        if self.adapter is None:
            return self
        if self.pretrained is None:
            raise ValueError("adapter changes weights that there are: give pretrained, or drop adapter")
        start = self.adapter.get("init_lora_weights", True)
        for key in ("megatron_config", "megatron_core"):
            if key in self.adapter:
                raise ValueError(f"adapter: {key} names a program, and a file of settings runs none; drop it")
        of_weights = next((key for key in _OF_WEIGHTS if self.adapter.get(key)), "")
        if isinstance(start, str) and start not in ("gaussian", "orthogonal"):
            of_weights = f"init_lora_weights = {start!r}"
        if of_weights:
            raise ValueError(
                f"adapter: {of_weights} starts from the values of full weights, and a rank reads its part: "
                "take 'gaussian', 'orthogonal' or the default, or make the model in a task (task.file)"
            )
        return self

    @field_validator("config")
    @classmethod
    def _is_data(cls, given: dict[str, Any]) -> dict[str, Any]:
        for key, value in given.items():
            if key.endswith("attn_implementation") and isinstance(value, str) and "/" in value:
                raise ValueError(f"{key} = {value!r} is a program of the Hub: give 'sdpa' or 'eager'")
            count = isinstance(value, int) and ("layer" in key or "expert" in key)
            if count and value > MOST_LAYERS:
                raise ValueError(f"{key} = {value} is more than {MOST_LAYERS:,}")
        return given


def _with_kind(given: Any) -> Any:
    return {"kind": GPTSettings.model_fields["kind"].default, **given} if isinstance(given, dict) else given


Model = Annotated[
    GPTSettings | MoESettings | HuggingFaceSettings, Field(discriminator="kind"), BeforeValidator(_with_kind)
]

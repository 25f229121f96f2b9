"""Fine-tuning as a task of `stretto train`: a checkpoint of Hugging Face learns from questions and answers.

python examples/docstrings.py answers.jsonl
stretto train examples/finetune.toml task.config.source=llama
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stretto.train.task import Task

IGNORED = -100  # the label of a token that does not count


def load(source: str) -> nn.Module:
    """The checkpoint's model, which is to train: in float32, and not in eval() as it comes."""
    if torch.get_default_device().type == "meta":  # its shapes are asked for, before ranks are started
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()


def read(data: str, source: str, length: int) -> dict[str, Tensor]:
    """Every line of a .jsonl with `prompt` and `answer` as a row of `length` tokens; answers alone count."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    end = tokenizer.eos_token_id
    rows, labels = [], []
    for line in Path(data).read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        both = (one["prompt"], one["answer"])
        prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in both)
        ids = [*prompt, *answer, end][:length]
        marks = [*[IGNORED] * len(prompt), *answer, end][:length]
        rows.append(ids + [end] * (length - len(ids)))  # nothing before it looks at what is behind
        labels.append(marks + [IGNORED] * (length - len(ids)))
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)}


def batches(rows: dict[str, Tensor], seed: int) -> Callable[[int, int], dict[str, Tensor]]:
    """(step, global_batch) -> the batch of a step, in an order that follows from the seed."""
    count = len(rows["input_ids"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return lambda step, size: {
        key: value[order[torch.arange(step * size, (step + 1) * size) % count]] for key, value in rows.items()
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, count) over the answers' tokens: each weighs alike, however they fall into microbatches."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return total, (labels != IGNORED).sum()


def task(config: dict[str, Any], seed: int) -> Task:
    """What `stretto train` trains: `config` has `source`, `data` and `length`."""
    rows = read(config["data"], config["source"], config["length"])
    kept = len(rows["input_ids"]) * 19 // 20  # the last twentieth is held out
    return Task(
        model=lambda: load(config["source"]),
        loss=loss,
        train=batches({key: value[:kept] for key, value in rows.items()}, seed),
        held_out=batches({key: value[kept:] for key, value in rows.items()}, seed),
        digest=hashlib.sha256(Path(config["data"]).read_bytes()).hexdigest(),
        unit="answers",
        held_out_words=(" nats a token of the answers", ""),
    )

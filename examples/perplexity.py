"""Loss, perplexity and bits a byte of an exported model on text of your own, in one process of plain PyTorch.

python examples/perplexity.py llama README.md docs/*.md
"""

import json
import math
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from stretto.models.build import huggingface_sum
from stretto.models.gpt import next_token_sum
from stretto.models.pretrained import load_gpt

folder, *files = sys.argv[1:]
config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
if config["model_type"] == "stretto-gpt":
    model, token_sum, length = load_gpt(folder), next_token_sum, config["context"]
else:
    model, token_sum = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), huggingface_sum
    length = model.config.max_position_embeddings

text = "".join(Path(name).read_text(encoding="utf-8") for name in files)
ids = torch.tensor(Tokenizer.from_file(f"{folder}/tokenizer.json").encode(text, add_special_tokens=False).ids)
total, count = 0.0, 0
with torch.no_grad():
    for start in range(0, len(ids) - 1, length):  # each token once, with what is before it in its stretch
        stretch = ids[start : start + length + 1]
        nats, tokens = token_sum(model, stretch[None])
        total, count = total + float(nats), count + int(tokens)
loss, bits = total / count, total / math.log(2) / len(text.encode())
print(f"{count:,} tokens, {len(text.encode()):,} bytes")
print(f"loss {loss:.4f} nats a token, perplexity {math.exp(loss):.2f}, {bits:.3f} bits a byte")

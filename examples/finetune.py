"""Fine-tune a checkpoint of Hugging Face in a loop of your own, and write one back.

python examples/docstrings.py answers.jsonl
torchrun --nproc-per-node 2 examples/finetune.py llama answers.jsonl tuned pp=2
"""

import sys

import torch
import torch.distributed as dist
from finetune_task import batches, load, loss, read
from transformers import AutoTokenizer

import stretto

source, data, target = sys.argv[1:4]
layout = {axis: int(size) for axis, size in (word.split("=") for word in sys.argv[4:])}
dist.init_process_group("gloo")
model = load(source)  # every rank reads the complete checkpoint, and keeps what its stages use
batch = batches(read(data, source, length=64), seed=0)

job = stretto.capture(model, batch(0, 16), loss, stretto.Parallel(**layout, microbatches=4))
runner = stretto.Runner(stretto.plan(job, cluster="local"), model)
optimizer = torch.optim.AdamW(runner.parameters(), lr=3e-4, weight_decay=0.0)
clip = stretto.GradientClip(runner, 1.0)

for step in range(20):
    value = runner.step(batch(step, 16))
    clip()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step} loss {float(value):.4f}", flush=True)

trained = runner.state_dict(only_on=0)  # every rank calls it; rank 0 gets the full model
if dist.get_rank() == 0:
    model.save_pretrained(target, state_dict=trained)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    print(f"wrote {target}", flush=True)
dist.destroy_process_group()

"""Train, save, and go on under another layout. Run it twice:

torchrun --nproc-per-node 2 examples/save_and_load.py runs/mine tp=2
torchrun --nproc-per-node 4 examples/save_and_load.py runs/mine pp=2 dp=2
"""

import os
import sys

import torch
import torch.distributed as dist

import stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_loss

folder, layout = sys.argv[1], {axis: int(size) for axis, size in (word.split("=") for word in sys.argv[2:])}
dist.init_process_group("gloo")
model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=16, tie_embeddings=True), seed=0)
tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))

job = stretto.capture(model, tokens, next_token_loss, stretto.Parallel(**layout, microbatches=2))
runner = stretto.Runner(stretto.plan(job, cluster="local"), model)
optimizer = torch.optim.AdamW(runner.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
done = 0
if os.path.exists(folder):
    extra = stretto.load(folder, runner, optimizer)  # whatever layout wrote it
    done = extra["done"]
    scheduler.load_state_dict(extra["scheduler"])

for step in range(done, done + 4):
    loss = runner.step(tokens)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if runner.rank == 0:
        print(f"step {step} loss {float(loss):.6f}", flush=True)

stretto.save(folder, runner, optimizer, {"done": done + 4, "scheduler": scheduler.state_dict()})
full = runner.state_dict(only_on=0)  # every rank calls it
if runner.rank == 0:
    torch.save(full, f"{folder}.pt")  # for the plain model's load_state_dict
dist.destroy_process_group()

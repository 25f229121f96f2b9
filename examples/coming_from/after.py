# torchrun --nproc-per-node 2 examples/coming_from/after.py
import torch
import torch.distributed as dist

import stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_loss

dist.init_process_group("gloo")
model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=16), seed=0)
example = torch.zeros(8, 17, dtype=torch.int64)  # of a step's batch, shapes and dtypes count
parallel = stretto.Parallel(dp=2)  # or pp=2, tp=2: the loop below stays as it is
job = stretto.capture(model, example, next_token_loss, parallel)
runner = stretto.Runner(stretto.plan(job, cluster="local"), model)
optimizer = torch.optim.AdamW(runner.parameters(), lr=1e-2)
clip = stretto.GradientClip(runner, 1.0)

for step in range(4):
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step))
    loss = runner.step(tokens)  # the full batch on every rank; forward and backward
    clip()
    optimizer.step()
    optimizer.zero_grad()
    if runner.rank == 0:
        print(f"step {step} loss {float(loss):.6f}")
dist.destroy_process_group()

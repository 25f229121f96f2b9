# torchrun --nproc-per-node 2 examples/coming_from/fsdp.py
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from stretto.models.gpt import GPT, GPTConfig, next_token_loss

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=16), seed=0)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(4):
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(size)[rank]  # each rank its part, as a DistributedSampler gives it
    loss = next_token_loss(model, mine)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    full = loss.detach().clone()
    dist.all_reduce(full)
    if rank == 0:
        print(f"step {step} loss {float(full) / size:.6f}")
dist.barrier()
dist.destroy_process_group()

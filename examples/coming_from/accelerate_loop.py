# accelerate launch --num_processes 2 --cpu examples/coming_from/accelerate_loop.py
import torch
from accelerate import Accelerator

from stretto.models.gpt import GPT, GPTConfig, next_token_loss

accelerator = Accelerator(cpu=True)
model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=16), seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)

for step in range(4):
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(accelerator.num_processes)[accelerator.process_index]
    loss = next_token_loss(model, mine)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {float(accelerator.reduce(loss.detach(), 'mean')):.6f}")
accelerator.end_training()

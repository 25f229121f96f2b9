"""One rank of a run with AdamW: prints the bytes that it held at most in its second step, and what its plan
said. Arguments: a layout (JSON of `Parallel`), and the precision."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

import stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.runtime.memory_adapter import MemoryMeter
from tests.clusters import cores


def main() -> None:
    torch.set_num_threads(1)
    layout, precision = json.loads(sys.argv[1]), sys.argv[2]
    model = GPT(GPTConfig(vocab_size=128, layers=4, hidden=64, heads=4, context=64), seed=3)
    batch = torch.randint(0, 128, (8, 65), generator=torch.Generator().manual_seed(5))
    job = stretto.capture(
        model, batch, next_token_loss, stretto.Parallel(microbatches=4, **layout), precision=precision
    )
    plan = stretto.plan(job, cores(), order="list")
    dist.init_process_group("gloo")
    runner = stretto.Runner(plan, model)
    del model
    optimizer = torch.optim.AdamW(runner.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        runner.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [t for of in optimizer.state.values() for t in of.values() if isinstance(t, torch.Tensor)]
    held = (*runner.parameters(), *runner.tensors.compute.values(), *runner.tensors.buffers.values(), *state)
    with MemoryMeter(held) as meter:
        step()
    place = plan.mesh.place(runner.rank)
    told = runner.timeline().peak_bytes[place]
    assert plan.prediction is not None
    predicted = plan.prediction.peak_bytes[place]
    print(json.dumps({"measured": meter.peak_bytes, "told": told, "predicted": predicted}))
    runner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

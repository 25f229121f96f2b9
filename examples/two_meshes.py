"""A two-stage model on two meshes, written once and run by all ranks.

    torchrun --nproc-per-node 4 examples/two_meshes.py

Ranks 0 and 1 keep the first layer, cut by rows; ranks 2 and 3 the second, cut by columns. Each rank computes
its own stage, and sees the shapes of the other.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import stretto

STEPS = 20


class TwoStages(nn.Module):
    """Two layers; between them the activations go to the second mesh."""

    def __init__(self, first: DeviceMesh, second: DeviceMesh) -> None:
        super().__init__()
        self.second_mesh = second
        self.up = stretto.shard(nn.Linear(32, 64, bias=False), first, [Shard(0)])
        self.down = stretto.shard(nn.Linear(64, 8, bias=False), second, [Shard(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        h = stretto.reshard(h, self.second_mesh, [Shard(1)])
        return self.down(h)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same full tensors on every rank
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    model = TwoStages(first, second)
    x = stretto.shard(torch.randn(16, 32), first, [Replicate()])
    y = stretto.shard(torch.randn(16, 8), second, [Replicate()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = F.mse_loss(model(x), y)
        loss.backward()  # on every rank: gradients go back over the border
        optimizer.step()
        optimizer.zero_grad()
        value = stretto.local(stretto.reshard(loss.detach(), second, [Replicate()]))
        if value is not None and dist.get_rank() == 2 and step % 5 == 4:
            print(f"step {step + 1}: loss {value.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

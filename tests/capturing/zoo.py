"""Small models that do what real ones do: each reads rows of 8 numbers and has four layers in a row."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


def rows(count: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return (out**2).mean()


SEEDED = threading.Lock()


class Chain(nn.Module):
    """Four layers with `act` between, and a last one; the base of most others."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        with SEEDED:  # ranks that are threads share PyTorch's generator
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
            self.out = nn.Linear(WIDTH, 2)
        self.double()

    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return self.out(x)


class InPlace(Chain):
    def act(self, x: Tensor) -> Tensor:
        x = x * 1
        x.add_(0.5).mul_(2)
        x[:, 0] = 0.25
        return x.sigmoid_()


class Masked(Chain):
    def act(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x < 0] = 0.1
        return torch.where(x > 1, x.sqrt(), x)


class Cube(torch.autograd.Function):
    """A function with a backward of its own, that is not the derivative: it must be this one that is used."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 7 * x * x


class OwnFunction(Chain):
    def act(self, x: Tensor) -> Tensor:
        return Cube.apply(x)


@torch.library.custom_op("stretto_tests::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halve.register_autograd(lambda ctx, grad: grad / 2)


class OwnOp(Chain):
    def act(self, x: Tensor) -> Tensor:
        return halve(torch.tanh(x))


class Shared(Chain):
    """One block used four times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__(layers=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.act(self.layers[0](x))
        return self.out(x)


class Skips(Chain):
    """The input of every layer is used again at the end, and the first two again in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for at, layer in enumerate(self.layers):
            seen.append(x)
            x = self.act(layer(x))
            if at == 2:
                x = x + seen[0] * seen[1]
        return self.out(x + torch.stack(seen).sum(0) + torch.cat(seen, -1).view(-1, 4, WIDTH).mean(1))


class ViewOfAView(Chain):
    """A value that crosses stages in a layout of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x)).view(-1, 2, 4).transpose(1, 2)
            x = torch.tanh(x.reshape(-1, WIDTH))
            x = x.t().contiguous().t()
        return self.out(x)


class OneGradForTwo(Chain):
    """Two parameters whose gradients are one value: `.grad` must be two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.a + self.b)


class WeightUsedTwice(Chain):
    """The first layer's weight is used again at the end, through a view: a tie without a name."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layers[0].weight
        return super().forward(x) + weight.sum() + weight.t()[0].square().sum()


class Penalised(Chain):
    """A parameter whose gradient is one number everywhere: an expanded tensor, which cannot be added to."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.5 * self.scales.sum()


class AddedLast(Chain):
    """A parameter of an activation's shape, added behind a layer; cut there, its gradient is the message."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.ones(1, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.act(layer(x))
            if number == 1:
                x = x + self.added
        return self.out(x)


class Frozen(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)


class Unused(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3).double()


class Recurrent(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(torch.stack((x, x + 1, x * 2), 1))[0][:, -1])


class Convolutions(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.MaxPool1d(2),
            nn.Flatten(),
        ).double()
        self.mix = nn.Linear(16, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(self.conv(x[:, None])))


class Encoder(Chain):
    """PyTorch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.encoder(torch.stack((x, x + 1, x * 2), 1)).sum(1))


class WeightNorm(Chain):
    def __init__(self) -> None:
        super().__init__()
        for at in (1, 2):
            self.layers[at] = nn.utils.parametrizations.weight_norm(self.layers[at])


class Hooked(Chain):
    """The user's own hooks, on a module and on a parameter, are part of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, args, output: output * 2)
        self.layers[2].weight.register_hook(lambda grad: grad * 3)


class Constants(Chain):
    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]) + torch.arange(WIDTH) / WIDTH


class GradientOfGradient(Chain):
    """The loss is made of a gradient, as for forces from an energy."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return grad


class Sorts(Chain):
    def act(self, x: Tensor) -> Tensor:
        best, at = x.topk(4, dim=-1)
        return torch.tanh(x.sort(dim=-1)[0]).scatter_add(1, at, best)


class Complex(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((torch.fft.fft(x) @ self.filter).abs())


EQUAL: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (Chain, *Chain.__subclasses__())}
"""Models whose loss and gradients are those of the plain model, in float64."""


class BatchNorm(Chain):
    """A buffer that every microbatch updates; `shared` uses one norm after every layer."""

    def __init__(self, shared: bool = False, layers: int = 4) -> None:
        super().__init__(layers)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(1 if shared else layers)).double()

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = self.act(self.norms[at % len(self.norms)](layer(x)))
        return self.out(x)


class Dropout(Chain):
    def act(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x), 0.3, self.training)


class Noise(Chain):
    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + 0.1 * torch.randn_like(x) * torch.rand(1, dtype=x.dtype)

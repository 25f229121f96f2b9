"""A task of your own: a small U-Net Transformer of `diffusers` that learns to draw scikit-learn's digits.

`examples/unet_transformer.toml` names this file. The U-Net is told how noisy an image is and which digit it
shows, and says how the noise was added (Ho, Jain and Abbeel 2020, arXiv 2006.11239): the velocity of Salimans
and Ho 2022 (arXiv 2202.00512), on the cosine schedule of Nichol and Dhariwal 2021 (arXiv 2102.09672), since
so few pixels are gone early. At the end it draws ten of each digit from noise alone (Song, Meng and Ermon
2021, arXiv 2010.02502), into samples.png.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.train.task import Task
from stretto.train.text import Say

try:
    from diffusers import DDIMScheduler, UNet2DConditionModel
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier
except ImportError as error:
    raise ImportError(f"{error} (pip install 'stretto[diffusion]')") from error

HELD_OUT = 1 / 10
"""Share of the 1,797 images that is never trained on."""
EACH = 10
"""How many of each digit are drawn."""
MARGIN, ENLARGED = 2, 5
"""White pixels around an image of 8 by 8, and pixels of the picture for one of these."""


def task(config: Mapping[str, Any], seed: int) -> Task:
    """config: what `drawing_digits` takes; a name that it does not know is refused."""
    return drawing_digits(seed, **config)


def drawing_digits(seed: int, *, channels: int = 16, sampling_steps: int = 50) -> Task:
    """channels: of the first of three levels. sampling_steps: how often the U-Net looks at an image that it
    draws."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # grey values were 0 to 16
    labels = torch.tensor(digits.target)
    count = round(len(images) * (1 - HELD_OUT))
    schedule = DDIMScheduler(1000, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")

    noise_share = 1 - schedule.alphas_cumprod
    wanted = float((1 - noise_share + noise_share * images.square().mean()).mean())

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return UNet2DConditionModel(
                sample_size=8,
                in_channels=1,
                out_channels=1,
                layers_per_block=1,
                down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
                block_out_channels=(channels, 2 * channels, 4 * channels),
                cross_attention_dim=10,
                attention_head_dim=4,  # how many heads: diffusers calls it so
                norm_num_groups=8,
            )

    def noisy(first: int, last: int, draw: torch.Generator, rows: int) -> dict[str, Tensor]:
        """Images from `first` to `last`, drawn at random, each with some noise."""
        chosen = torch.randint(first, last, (rows,), generator=draw)
        noise = torch.randn(rows, *images.shape[1:], generator=draw)
        time = torch.randint(0, schedule.config.num_train_timesteps, (rows,), generator=draw)
        return {
            "image": schedule.add_noise(images[chosen], noise, time),
            "time": time,
            "digit": as_states(labels[chosen]),
            "wanted": schedule.get_velocity(images[chosen], noise, time),
        }

    def train(step: int, rows: int) -> dict[str, Tensor]:
        return noisy(0, count, torch.Generator().manual_seed((seed << 32) + step), rows)

    def held_out(step: int, rows: int) -> dict[str, Tensor]:
        return noisy(count, len(images), torch.Generator().manual_seed(step), rows)

    def report(model: nn.Module, folder: Path, say: Say) -> Mapping[str, Any]:
        asked = torch.arange(10).repeat_interleave(EACH)
        drawn = sample(model, schedule, asked, sampling_steps)
        path = folder / "samples.png"
        picture(drawn).save(path)
        judge = KNeighborsClassifier(1).fit(digits.data / 8 - 1, digits.target)
        told = judge.predict(drawn.flatten(1).numpy())
        share = float((told == asked.numpy()).mean())
        say("")
        say(f"samples: {len(asked)} digits in {path}; {share:.0%} look like the digit asked for")
        return {"samples": str(path), "samples_recognised": share}

    return Task(
        model=model,
        loss=loss,
        train=train,
        held_out=held_out,
        digest=hashlib.sha256(digits.data.tobytes()).hexdigest(),
        report=report,
        unit="images",
        held_out_words=("", f"; {wanted:.2f} is the mean square of what the model is to say"),
    )


def as_states(digits: Tensor) -> Tensor:
    """What a U-Net attends to: one state, which says the digit."""
    return nn.functional.one_hot(digits, 10).float()[:, None]


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """(sum, count) of the squared error, over pixels."""
    said = model(batch["image"], batch["time"], encoder_hidden_states=batch["digit"]).sample
    return nn.functional.mse_loss(said, batch["wanted"], reduction="sum"), batch["wanted"].numel()


@torch.no_grad()
def sample(model: nn.Module, schedule: DDIMScheduler, digits: Tensor, steps: int) -> Tensor:
    """Images of the digits asked for, from noise."""
    schedule.set_timesteps(steps)
    images = torch.randn(len(digits), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for time in schedule.timesteps:
        noise = model(images, time, encoder_hidden_states=as_states(digits)).sample
        images = schedule.step(noise, time, images).prev_sample
    return images


def picture(images: Tensor) -> Image.Image:
    """A row for each digit."""
    tiles = nn.functional.pad(images, (MARGIN,) * 4, value=-1.0)
    high, wide = tiles.shape[-2:]
    rows = tiles.reshape(10, EACH, high, wide).permute(0, 2, 1, 3).reshape(10 * high, EACH * wide)
    grey = ((1 - rows.clamp(-1, 1)) * 127.5).round().numpy().astype(np.uint8)
    size = EACH * wide * ENLARGED, 10 * high * ENLARGED
    return Image.fromarray(grey).resize(size, Image.Resampling.NEAREST)

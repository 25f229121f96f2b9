"""Draw one training step without and with overlap: the picture of the README. Needs no device.

python examples/overlap_picture.py docs/overlap.svg
"""

import sys
from pathlib import Path

import torch

import stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.report.svg import draw

config = GPTConfig(vocab_size=4096, layers=8, hidden=512, heads=8, context=256)
with torch.device("meta"):
    model = GPT(config)
batch = torch.zeros(6, config.context + 1, dtype=torch.int64)

# Two processor cores over a link of 100 Mbit/s.
cluster = stretto.Cluster(peak_tflops=0.085, memory_gbps=10, link_gbps=0.0125, latency_us=300)

timelines, titles = [], []
for schedule, overlap, title in (
    ("1f1b", "off", "1F1B, every message waited for at once"),
    ("zb-h2", "local", "Stretto: ZB-H2, messages under computation"),
):
    parallel = stretto.Parallel(pp=2, microbatches=6, schedule=schedule)
    job = stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)
    plan = stretto.plan(job, cluster, overlap=overlap)
    timeline = stretto.simulate(plan)
    timelines.append(timeline)
    titles.append(f"{title}: {timeline.step_us / 1e6:.2f} s, {timeline.exposed_us['pp'] / 1e6:.2f} s exposed")
    print(plan, end="\n\n")

out = Path(sys.argv[1] if len(sys.argv) > 1 else "overlap.svg")
out.write_text(draw(timelines, titles))
print(f"wrote {out}")

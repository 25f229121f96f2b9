"""Stretto: train large models on many devices, with communication hidden behind computation.

parallel = stretto.Parallel(pp=2, microbatches=8, schedule="eager-1f1b")
job = stretto.capture(model, batch, loss=loss, parallel=parallel)   # no device needed
plan = stretto.plan(job, cluster="local")
runner = stretto.Runner(plan, model)                                # under torchrun
loss = runner.step(batch)                                           # gradients are in .grad
"""

# The functions come after their packages of the same name, so that `stretto.capture` is the function;
# code inside imports from full paths (`from stretto.capture.trace import ...`), which always works.
from stretto import report as _report  # noqa: F401 - teaches timelines to save themselves
from stretto.capture import capture
from stretto.config import ParallelSettings as Parallel
from stretto.cost import Cluster
from stretto.errors import CaptureError, PlanError, RunError, StrettoError, UsageError
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.serialize import load_plan
from stretto.ir.timeline import Timeline
from stretto.planning import plan
from stretto.runtime import Runner, run_threads
from stretto.simulate import simulate
from stretto.verify import verify

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Cluster",
    "Job",
    "Parallel",
    "Plan",
    "PlanError",
    "RunError",
    "Runner",
    "StrettoError",
    "Timeline",
    "UsageError",
    "capture",
    "load_plan",
    "plan",
    "run_threads",
    "simulate",
    "verify",
]

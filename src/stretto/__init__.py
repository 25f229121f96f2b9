"""Stretto: train large models on many devices, with communication hidden behind computation.

    parallel = stretto.Parallel(pp=2, microbatches=8, schedule="eager-1f1b")
    job = stretto.capture(model, batch, loss=loss, parallel=parallel)   # no device needed
    plan = stretto.plan(job, cluster="local")
    runner = stretto.Runner(plan, model)                                # under torchrun
    loss = runner.step(batch)                                           # gradients are in .grad

Names are loaded on first use, so that printing a schedule does not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.backend.observe_adapter import observe
    from stretto.batch.tree import replicated
    from stretto.capturing import capture
    from stretto.checking.compare import Check, check
    from stretto.config import Parallel, load_settings
    from stretto.errors import CaptureError, PlanError, RunError, StrettoError, UsageError
    from stretto.ir.action import Schedule
    from stretto.ir.plan import Plan
    from stretto.ir.program import Job
    from stretto.ir.serialize import load_plan
    from stretto.ir.timeline import Timeline
    from stretto.order.policies import register as register_order
    from stretto.passes import register as register_pass
    from stretto.planning.make_plan import plan
    from stretto.price.cluster import Cluster
    from stretto.runtime import Runner, run_threads
    from stretto.runtime.rehearse import Rehearsal, rehearse
    from stretto.saving.face import async_save, load, save
    from stretto.saving.pretrained import fill
    from stretto.schedule.families import make_schedule
    from stretto.schedule.families import register as register_schedule
    from stretto.simulating import simulate
    from stretto.tensor.face import GlobalTensor, local, reshard, reshard_all, shard
    from stretto.train.callbacks import Callback
    from stretto.train.clip import GradientClip
    from stretto.train.heldout import Evaluation
    from stretto.train.task import Task
    from stretto.verifying import verify

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CaptureError",
    "Check",
    "Cluster",
    "Evaluation",
    "GlobalTensor",
    "GradientClip",
    "Job",
    "Parallel",
    "Plan",
    "PlanError",
    "Rehearsal",
    "RunError",
    "Runner",
    "Schedule",
    "StrettoError",
    "Task",
    "Timeline",
    "UsageError",
    "async_save",
    "capture",
    "check",
    "fill",
    "load",
    "load_plan",
    "load_settings",
    "local",
    "make_schedule",
    "observe",
    "plan",
    "register_order",
    "register_pass",
    "register_schedule",
    "rehearse",
    "replicated",
    "reshard",
    "reshard_all",
    "run_threads",
    "save",
    "shard",
    "simulate",
    "verify",
]

_HOMES = {
    # public name: its module, or module:name where it has another name there
    "Callback": "stretto.train.callbacks",
    "CaptureError": "stretto.errors",
    "Check": "stretto.checking.compare",
    "Cluster": "stretto.price.cluster",
    "Evaluation": "stretto.train.heldout",
    "GlobalTensor": "stretto.tensor.face",
    "GradientClip": "stretto.train.clip",
    "Job": "stretto.ir.program",
    "Parallel": "stretto.config",
    "Plan": "stretto.ir.plan",
    "PlanError": "stretto.errors",
    "Rehearsal": "stretto.runtime.rehearse",
    "RunError": "stretto.errors",
    "Runner": "stretto.runtime",
    "Schedule": "stretto.ir.action",
    "StrettoError": "stretto.errors",
    "Task": "stretto.train.task",
    "Timeline": "stretto.ir.timeline",
    "UsageError": "stretto.errors",
    "async_save": "stretto.saving.face",
    "capture": "stretto.capturing",
    "check": "stretto.checking",
    "fill": "stretto.saving.pretrained",
    "load": "stretto.saving.face",
    "load_plan": "stretto.ir.serialize",
    "load_settings": "stretto.config",
    "local": "stretto.tensor.face",
    "make_schedule": "stretto.schedule.families",
    "observe": "stretto.backend.observe_adapter",
    "plan": "stretto.planning.make_plan",
    "register_order": "stretto.order.policies:register",
    "register_pass": "stretto.passes:register",
    "register_schedule": "stretto.schedule.families:register",
    "rehearse": "stretto.runtime.rehearse",
    "reshard": "stretto.tensor.face",
    "reshard_all": "stretto.tensor.face",
    "run_threads": "stretto.runtime",
    "save": "stretto.saving.face",
    "shard": "stretto.tensor.face",
    "simulate": "stretto.simulating",
    "verify": "stretto.verifying",
    "replicated": "stretto.batch.tree",
}

_WITH_REPORT = (
    *(
        "Job",
        "Plan",
        "Runner",
        "Timeline",
        "capture",
        "load_plan",
        "plan",
        "rehearse",
        "run_threads",
        "simulate",
    ),
)
"""Names that lead to timelines, plans and jobs: `stretto.report` teaches them to save and show themselves."""


def __getattr__(name: str) -> Any:
    if name == "passes":  # `stretto.passes.register`, without an import of its own
        return import_module("stretto.passes")
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    if name in _WITH_REPORT:
        import_module("stretto.report")
    home, _, own_name = _HOMES[name].partition(":")
    return getattr(import_module(home), own_name or name)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]

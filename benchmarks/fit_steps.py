"""The few factors of a training step that no sheet says, fitted on every second single-node row of vTrain's.

python -m benchmarks fit-steps    # some minutes: prints what the catalogue and `analytic` carry
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.analytic import MEGATRON_DEEPSPEED
from benchmarks.published import STEP_DEVICE, MeasuredStep, errors, step_rows
from stretto.price.devices import device

FACTORS: Mapping[str, tuple[float, float]] = {
    # name: (least, most) that is credible
    "kernel_us": (1.0, 10.0),
    "launch_us": (2.0, 40.0),
    "unaligned": (0.1, 1.0),
    "backward_launches": (30.0, 120.0),
    "collective_launches": (0.5, 20.0),
    "message_us": (10.0, 2000.0),
    "step_us": (100.0, 20_000.0),
}
"""What is fitted; all else is the catalogue's."""

START = {
    "kernel_us": 2.0,
    "launch_us": 10.0,
    "unaligned": 0.5,
    "backward_launches": 60.0,
    "collective_launches": 4.0,
    "message_us": 50.0,
    "step_us": 1000.0,
}
"""Where the fit begins: round numbers."""


Factors = Mapping[str, float]


def shipped() -> Factors:
    """The factors that the catalogue and `MEGATRON_DEEPSPEED` carry."""
    reach = device(STEP_DEVICE).roof().efficiency
    result = {name: getattr(reach, name, None) for name in FACTORS}
    return {name: getattr(MEGATRON_DEEPSPEED, name) if v is None else v for name, v in result.items()}


def mean_error(rows: Sequence[MeasuredStep], values: Factors) -> float:
    """With these factors, applied to the device and the software that they belong to."""
    roof = device(STEP_DEVICE).roof()
    of_device = {name: v for name, v in values.items() if hasattr(roof.efficiency, name)}
    of_software = {name: v for name, v in values.items() if hasattr(MEGATRON_DEEPSPEED, name)}
    result = errors(
        rows,
        roof=replace(roof, efficiency=replace(roof.efficiency, **of_device)),
        software=replace(MEGATRON_DEEPSPEED, **of_software),
    )
    return statistics.fmean(map(abs, result))


def fit(rows: Sequence[MeasuredStep], start: Factors = START) -> Factors:
    """The factors of least mean error on `rows`: one at a time up and down by a part that is halved when
    nothing helps, until it is under 1 %. Deterministic."""
    values, part = dict(start), 0.4
    least = mean_error(rows, values)
    while part > 0.01:
        better = False
        for name, (low, high) in FACTORS.items():
            for factor in (1 + part, 1 / (1 + part)):
                tried = {**values, name: min(max(values[name] * factor, low), high)}
                error = mean_error(rows, tried)
                if error < least - 1e-6:
                    values, least, better = tried, error, True
                    break
        if not better:
            part /= 2
    return values


def main(arguments: Sequence[str] = ()) -> None:
    train = step_rows("single")[::2]
    fitted = fit(train)
    print({name: round(value, 4) for name, value in fitted.items()}, mean_error(train, fitted))

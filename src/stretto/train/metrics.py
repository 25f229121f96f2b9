"""What each step gave, as lines of JSON and, if asked for, as TensorBoard events. Rank 0 writes them.

Keys: step (steps done), loss, lr, grad_norm, step_s, tokens_per_s, tokens_per_s_per_device; mfu where a
device's peak is known; exposed_fraction on the steps whose timeline was gathered; observed on those that are
logged, of a model that lets see something (module -> name -> by element, the mean of the steps since the last
such line); held_out_loss on a line of its own, with what was observed in that measurement.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, UsageError
from stretto.files.parse import parse_json
from stretto.files.whole_file import write_file
from stretto.ir.metrics import Observed
from stretto.ir.work import Work

NAMES = {
    "loss": "loss/train",
    "held_out_loss": "loss/held_out",
    "lr": "optimizer/lr",
    "grad_norm": "optimizer/grad_norm",
    "tokens_per_s": "speed/tokens_per_s",
    "tokens_per_s_per_device": "speed/tokens_per_s_per_device",
    "mfu": "speed/mfu",
    "exposed_fraction": "speed/exposed_fraction",
}
"""Key of a line -> name of the scalar in TensorBoard."""


def check_tensorboard(wanted: bool) -> None:
    """Raise UsageError, before anything is started, if TensorBoard was asked for and is not there."""
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "output.tensorboard = true needs the package tensorboard: pip install 'stretto[tensorboard]'"
        )


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Around work that writes in a run's folder: an error of the system becomes a StrettoError."""
    try:
        yield
    except OSError as error:
        raise StrettoError(
            f"cannot write {where}: {error.strerror}; free some space, or set output.run_dir elsewhere"
        ) from None


def observed_line(seen: Sequence[Observed]) -> dict[str, dict[str, list[float]]]:
    """Metrics as a line has them, with six digits."""
    line: dict[str, dict[str, list[float]]] = {}
    for one in seen:
        line.setdefault(one.module, {})[one.name] = [float(f"{value:.6g}") for value in one.mean]
    return line


def speed_line(unit: str, count: int, step_s: float, world: int, work: Work) -> dict[str, float]:
    """How fast a step of `count` tokens, samples or the like (`unit`) was on `world` devices, the optimizer
    included: in all, by device, and as MFU where the device's peak is known (`stretto.ir.work`)."""
    per_s = count / step_s
    line = {"step_s": step_s, f"{unit}_per_s": per_s, f"{unit}_per_s_per_device": per_s / world}
    mfu = work.mfu(1e6 * step_s)
    return line if mfu is None else {**line, "mfu": mfu}


class Metrics:
    """Writes metrics.jsonl in a run's folder. `write` and `close` are all that a step needs."""

    def __init__(self, run_dir: Path, from_step: int, tensorboard: bool) -> None:
        """from_step: steps done before this run; later lines of an earlier run are taken out.

        Raises StrettoError when the file cannot be written.
        """
        self._path = run_dir / "metrics.jsonl"
        with writing(self._path):
            kept = _lines_up_to(self._path, from_step)
            write_file(self._path, b"".join(line + b"\n" for line in kept))
            self._file = self._path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=from_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line; it has `step`. Raises StrettoError when the disk is full."""
        with writing(self._path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._board is not None:
            for key, name in NAMES.items():
                if key in line:
                    self._board.add_scalar(name, line[key], line["step"])

    def close(self) -> None:
        """Close the files, also where they cannot be written to their ends, which raises StrettoError."""
        with writing(self._path), self._file:
            if self._board is not None:
                self._board.close()


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """The complete lines of steps that are not to be done again."""
    if step == 0 or not path.is_file():
        return []
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines():
        try:
            if int(parse_json(line)["step"]) <= step:
                kept.append(line)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            continue  # A run that was killed may have left half a line.
    return kept

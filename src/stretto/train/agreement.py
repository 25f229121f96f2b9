"""Ranks agree on what they are about to train: settings, tokens, and the checkpoint that they go on from.

Each reads its own files. On machines that do not share them, ranks may find others, train side by side on
different things, and no loss tells. Compares, and changes nothing:

    1. Every rank tells what it found, before it builds anything on it.
    2. All come to one verdict, and refuse with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.train.checkpoint_files import State
from stretto.train.compatible import flat
from stretto.train.data import TextData
from stretto.train.world import World, tell_all

OWN = (
    "name",
    "data.paths",
    "data.cache_dir",
    "checkpoint.dir",
    "checkpoint.resume",
    "output.run_dir",
    "training.threads_per_rank",
)
"""Settings that each machine may have to itself: where things are, and how fast it computes. What is found
there is compared instead."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank is about to train. tokens: their digest. checkpoint: None starts anew."""

    settings: dict[str, Any]
    tokens: str
    where: str
    checkpoint: tuple[str, int, int] | None
    folder: str

    @staticmethod
    def of(settings: TrainSettings, data: TextData, found: tuple[State, Path] | None) -> Found:
        """found: the checkpoint to go on from, and its path."""
        kept = {key: value for key, value in flat(settings.model_dump(mode="json")) if key not in OWN}
        at = None if found is None else (found[1].name, found[0].step, found[0].draws)
        folder = settings.checkpoint_dir if found is None else found[1].parent
        return Found(kept, data.digest, str(data.folder), at, str(folder))


def check_agreement(
    world: World, settings: TrainSettings, data: TextData, found: tuple[State, Path] | None
) -> None:
    """Every rank must call it. Raises the same UsageError on all ranks when two found different things."""
    told = _difference(tell_all(world, Found.of(settings, data, found)))
    if told:
        raise UsageError(told)


def _difference(found: Sequence[Found]) -> str:
    """Step 2: "" when all found the same. found: by rank."""
    first = found[0]
    for rank, other in enumerate(found):
        keys = {**first.settings, **other.settings}
        apart = [key for key in keys if first.settings.get(key) != other.settings.get(key)]
        if apart:
            key = apart[0]
            more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
            return (
                f"{key} = {other.settings.get(key)!r} on rank {rank}, but {first.settings.get(key)!r} on "
                f"rank 0{more}: start all ranks with the same settings"
            )
        if other.tokens != first.tokens:
            return (
                f"data.paths: the tokens on rank {rank} ({other.where}) are others than those on rank 0 "
                f"({first.where}): the text differs, or the tokenizers package; bring both to every machine"
            )
        if other.checkpoint != first.checkpoint:
            return (
                f"checkpoint.resume: rank {rank} {_aim(other)}, but rank 0 {_aim(first)}: set checkpoint.dir "
                "to a folder that all machines share, or start anew with --no-resume"
            )
    return ""


def _aim(found: Found) -> str:
    if found.checkpoint is None:
        return f"finds no checkpoint in {found.folder}"
    name, step, _ = found.checkpoint
    return f"goes on from {found.folder}/{name}, after step {step}"

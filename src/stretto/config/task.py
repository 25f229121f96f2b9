"""Settings of a task of one's own: data, model and loss from a file of Python, in the place of text."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from stretto.config.base import Settings


class TaskSettings(Settings):
    """A task of one's own: a file has its data, model and loss, and `[model]` and `[data]` are absent."""

    file: str = Field(min_length=1)
    """A file of Python with a function `task(config, seed)` that returns a `stretto.train.task.Task`;
    relative to the working directory."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What the function is given as `config`."""

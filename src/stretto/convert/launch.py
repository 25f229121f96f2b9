"""The training command in a text, and the number of ranks that its launcher starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.convert.flags import ALIASES, TABLE
from stretto.convert.shell import Call, Shell, run, shown
from stretto.errors import UsageError

TALK = {"echo", "printf", "cat", "tee", "[", "[[", "test"}
"""Commands whose words are not run."""
LAUNCHERS = (
    # how it is called, its flags for ranks a node and for nodes
    (("torchrun",), "--nproc-per-node", "--nnodes"),
    (("torch.distributed.launch", "torch.distributed.run"), "--nproc-per-node", "--nnodes"),
    (("deepspeed",), "--num-gpus", "--num-nodes"),
)
"""Launchers that say how many ranks they start; docs of PyTorch and of DeepSpeed."""


@dataclass(frozen=True, slots=True)
class Command:
    """arguments: the words behind the program. ranks: of the launcher, if it says so. notes: what in the text
    may change it."""

    arguments: tuple[str, ...]
    ranks: int | None
    notes: tuple[str, ...]


def find_command(text: str, shell: Shell) -> Command:
    """The one training command of a shell text, or the text itself where it is a list of arguments, or empty.

    Raises UsageError where there is none, or more than one.
    """
    lines = [line.strip() for line in text.splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if not first:
        return Command((), None, ())
    if first.startswith("-"):
        calls = run(text, shell, one=True)
        if lost := [word for call in calls[1:] for word in call.words if word.startswith("--")]:
            raise UsageError(
                f"{shown(lost[0])} stands behind one of ( ) ; & | <, which end a command; quote that"
            )
        return Command(calls[0].words if calls else (), _world(shell), _notes(shell, False))
    found = [(call, at) for call in run(text, shell) if (at := _program(call)) is not None]
    if not found:
        raise UsageError(
            "there is no training command: expected a line such as `torchrun ... pretrain_gpt.py "
            "--num-layers 12 ...`, or the flags alone (a file's name goes to --megatron-file)"
        )
    if len(found) > 1:
        lines = [str(call.line) for call, _ in found]
        raise UsageError(
            f"there are {len(found)} training commands, on lines {', '.join(lines)}; leave one of them"
        )
    call, at = found[0]
    ranks = _ranks(call.words[:at])
    notes = _notes(shell, call.sometimes)
    return Command(call.words[at:], _world(shell) if ranks is None else ranks, notes)


def _program(call: Call) -> int | None:
    """Where the arguments of a training command begin; None for another command."""
    if call.words[0] in TALK:
        return None
    for at, word in enumerate(call.words):
        module = at > 0 and call.words[at - 1] in ("-m", "--module") and not word.startswith("torch.")
        if word.endswith(".py") or module:
            names = [word.partition("=")[0] for word in call.words[at + 1 :]]
            return at + 1 if any(ALIASES.get(name, name) in TABLE for name in names) else None
    return None


def _ranks(words: Sequence[str]) -> int | None:
    """Ranks a node times nodes, where the launcher's words say both as numbers."""
    for names, each, nodes in LAUNCHERS:
        if any(word.rpartition("/")[2] in names for word in words):
            count, of = _option(words, each, None), _option(words, nodes, 1)
            return None if count is None or of is None else count * of
    return None


def _option(words: Sequence[str], name: str, default: int | None) -> int | None:
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == name:
            text = value if equals else words[at + 1] if at + 1 < len(words) else ""
            return int(text) if text.isdecimal() and int(text) else None
    return default


def _world(shell: Shell) -> int | None:
    """The text's own WORLD_SIZE."""
    value = shell.variables.get("WORLD_SIZE", "")
    return int(value) if isinstance(value, str) and value.isdecimal() and int(value) else None


def _notes(shell: Shell, sometimes: bool) -> tuple[str, ...]:
    notes = [
        f"line {line}: {name} is set within an if or a loop, which is not run; give --var {name}=VALUE, or "
        "append what it adds"
        for name, line in shell.maybe.items()
        if name in shell.used
    ]
    if sometimes:
        notes.append("the training command is within an if or a loop; it is read as if it ran once")
    return tuple(notes)

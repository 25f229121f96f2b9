"""The flags of one training command, from a text that has them as the process got them.

A text is one of three:

  the table of arguments that Megatron-LM prints at its start, alone or within a log: defaults are resolved
  a command: a line of `ps`, of a log or of a script, with a program (`pretrain_gpt.py`, `-m MODULE`)
  flags alone, in one line or many, or between null bytes as in /proc/PID/cmdline

Lines may be continued with a backslash, and lines of comments are skipped. Nothing is expanded: a variable is
refused. `arguments` reads what the flags mean.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from stretto.convert.arguments import ALIASES, TABLE
from stretto.convert.flags import Flag
from stretto.errors import UsageError

TITLE = re.compile(r"-{8,} arguments -{8,}")
END = re.compile(r"-{8,} end of arguments -{8,}")
ROW = re.compile(r"(\w+) (?:\.+| ) ?(.*)$")
"""`  num_layers ...................................... 96`; names of 47 letters and more have no dots."""
NOTHING = {"", "None", "False", "[]"}
"""Values of arguments that were not given, and have no default."""
OTHER_NAMES = {
    "fp8": "--fp8-format",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "transformer_pipeline_model_parallel_size": "--pipeline-model-parallel-size",
}
"""Arguments -> their flags, where these are called otherwise."""
INVERTED = {"add_bias_linear": "--disable-bias-linear", "add_position_embedding": "--no-position-embedding"}
"""Arguments -> the flags that switch them off, besides --no-X and --disable-X."""
RESOLVED = {
    "adlr_autoresume_interval",
    "cuda_graph_scope",
    "encoder_num_layers",
    "encoder_seq_length",
    "end_weight_decay",
    "fp8_amax_compute_algo",
    "fp8_amax_history_len",
    "fp8_interval",
    "fp8_margin",
    "fp8_recipe",
    "moe_router_bias_update_rate",
    "rope_scaling_factor",
    "start_weight_decay",
}
"""Arguments that always have a value, and matter only beside another, which is in the table too."""

LAUNCHERS = (
    # how it is called, its flags for ranks a node and for nodes
    (("torchrun",), "--nproc-per-node", "--nnodes"),
    (("torch.distributed.launch", "torch.distributed.run"), "--nproc-per-node", "--nnodes"),
    (("deepspeed",), "--num-gpus", "--num-nodes"),
)
"""Launchers that say how many ranks they start; docs of PyTorch and of DeepSpeed."""

OPERATOR = re.compile(r"\d*[<>|&;]")
EXPAND = (
    "give the command as the process got it (a line of `ps -eo args`, or what the script prints with `echo` "
    "before the command), or the table of arguments that Megatron prints at its start"
)


@dataclass(frozen=True, slots=True)
class Command:
    """words: the flags and their values. ranks: of the launcher or of the table, if it says so."""

    words: tuple[str, ...]
    ranks: int | None = None


def read_command(text: str) -> Command:
    """The one training command of a text. Raises UsageError where there is none, or more than one, and for
    what only a shell can read."""
    if TITLE.search(text):
        return _of_table(text)
    if "\0" in text:
        return _of_words([word for word in text.split("\0") if word], flags_alone=True)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines) + "\n").strip()
    if not joined:
        return Command(())
    if joined.startswith("-"):
        return _of_words(_split(joined), flags_alone=True)
    commands = [line for line in joined.splitlines() if _program(line.split()) is not None]
    if not commands:
        raise UsageError(
            "there is no training command: expected a line such as `torchrun ... pretrain_gpt.py "
            "--num-layers 12 ...`, the flags alone, or the table of arguments that Megatron prints at its "
            "start (a file's name goes to --megatron-file)"
        )
    if len(commands) > 1:
        raise UsageError(f"there are {len(commands)} training commands; leave one of them")
    return _of_words(_split(commands[0]))


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the command cannot be read: {str(error).lower()}; close the quote") from None
    for word in words:
        if "$" in word or "`" in word:
            raise UsageError(f"what {word} is, the text does not say; {EXPAND}")
        if OPERATOR.match(word) or word.endswith(";"):
            raise UsageError(f"{word} is for a shell: leave it and what follows it out, or quote it")
        if word.startswith("#"):
            raise UsageError(f"a comment is behind flags ({word}): leave it out, or give it its own line")
    return words


def _of_words(words: Sequence[str], flags_alone: bool = False) -> Command:
    at = _program(words)
    if at is not None:
        return Command(tuple(words[at:]), _ranks(words[:at]))
    if not flags_alone:
        raise UsageError(f"the command is within quotes; {EXPAND}")
    return Command(tuple(words))


def _program(words: Sequence[str]) -> int | None:
    for at, word in enumerate(words):
        module = at > 0 and words[at - 1] in ("-m", "--module") and not word.startswith("torch.")
        if word.endswith(".py") or module:
            names = [word.partition("=")[0] for word in words[at + 1 :]]
            return at + 1 if any(ALIASES.get(name, name) in TABLE for name in names) else None
    return None


def _ranks(words: Sequence[str]) -> int | None:
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


def _of_table(text: str) -> Command:
    """Arguments as flags: those that became settings or that Stretto has not. What is not needed, or has
    Megatron's own value, is left out."""
    lines = text[TITLE.search(text).end() :].splitlines()  # type: ignore[union-attr]
    end = next((at for at, line in enumerate(lines) if END.search(line)), None)
    if end is None:
        raise UsageError("the table of arguments has no end: give all of it, to `end of arguments`")
    if any(TITLE.search(line) for line in lines[end:]):
        raise UsageError("there are two tables of arguments; leave one of them")
    values = {row[1]: row[2].strip() for line in lines[:end] if (row := ROW.search(line)) is not None}
    if values.get("add_bias_linear") == "True":
        values.pop("add_qkv_bias", None)  # Megatron sets it then
    given = {name for name, value in values.items() if value not in NOTHING}
    words: list[str] = []
    for name, value in values.items():
        words += _flag_of(name, value, given)
    ranks = values.get("world_size", "")
    return Command(tuple(words), int(ranks) if ranks.isdecimal() and int(ranks) else None)


def _flag_of(name: str, value: str, given: Container[str]) -> Iterator[str]:
    for off in (INVERTED.get(name, ""), f"--no-{name}", f"--disable-{name}"):
        row = TABLE.get(off.replace("_", "-"))
        if row is not None and row.takes == "nothing":
            if value == "False" and row.fate != "not needed":
                yield row.name
            return
    row = TABLE.get(OTHER_NAMES.get(name, f"--{name.replace('_', '-')}"))
    if row is None or row.fate == "not needed" or name not in given or name in RESOLVED:
        return
    if row.needs and row.needs.lstrip("-").replace("-", "_") not in given:
        return
    words = _words(row, value)
    if words != (row.default if isinstance(row.default, list) else [str(row.default)]):
        yield row.name
        yield from words


def _words(row: Flag, value: str) -> list[str]:
    if row.takes == "nothing":
        return []
    if row.takes == "many":
        try:
            parsed = ast.literal_eval(value)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            parsed = value
        return [str(one) for one in parsed] if isinstance(parsed, list | tuple) else [value]
    return [value]

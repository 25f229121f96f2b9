"""A command line of Megatron-LM or MindSpeed becomes settings, and a list of what became of each flag.

1. The training command of each text is read, or the table that Megatron prints (`command`).
2. Its flags are read by the table (`arguments`); the last of a flag counts.
3. `model`, `layout` and `training` make settings of them (`tally`).
4. The settings are checked by the tree that `stretto train` reads, and written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit

from stretto.config import TrainSettings
from stretto.convert.arguments import TABLE, Tally, read_arguments
from stretto.convert.command import read_command
from stretto.convert.flags import Fate
from stretto.convert.layout import put_layout, real_layers
from stretto.convert.model import put_model
from stretto.convert.training import put_training
from stretto.errors import UsageError
from stretto.files.parse import parse_toml
from stretto.files.settings_file import faults_of


@dataclass(frozen=True, slots=True)
class FlagOutcome:
    """What became of one flag. flag: as it was written."""

    flag: str
    fate: Fate | str
    what: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """text: the settings as a TOML file. outcomes: of every flag. notes: what else to know."""

    text: str
    outcomes: tuple[FlagOutcome, ...]
    notes: tuple[str, ...]

    def of(self, fate: str) -> list[FlagOutcome]:
        """The flags of one fate: taken, not needed, lacking, unknown."""
        return [outcome for outcome in self.outcomes if outcome.fate == fate]


def convert(texts: Sequence[str], *, ranks: int | None = None) -> Conversion:
    """Read commands, flags, or tables of arguments; flags of later texts count before those of earlier ones.

    ranks: of the run; without it those of the launcher or of the table. Raises UsageError that lists every
    fault: a flag without its value, a value that is none, a flag that cannot be done without, settings that
    do not fit together.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the command is not UTF-8: {error}") from None
    commands = [read_command(text) for text in texts]
    if ranks is None:
        ranks = next((c.ranks for c in reversed(commands) if c.ranks is not None), None)
    tally = read_arguments([word for command in commands for word in command.words])
    if not tally.given and not tally.refused:
        raise UsageError("there are no flags of Megatron-LM: expected such as --num-layers 12")
    _put_all(tally, ranks)
    outcomes = tuple(_outcomes(tally))
    faults = [*dict.fromkeys(tally.refused)]
    faults += [f"{outcome.flag}: {outcome.what}" for outcome in outcomes if outcome.fate == "refused"]
    text = "" if faults else _text(tally, outcomes)
    if faults := faults or _faults(tally, text):
        raise UsageError("\n".join(faults))
    return Conversion(text, outcomes, tuple(tally.absent))


def _put_all(tally: Tally, ranks: int | None) -> None:
    real = real_layers(tally)
    experts = put_model(tally, real)
    put_layout(tally, experts, ranks, real)
    put_training(tally)
    for name, row in TABLE.items():
        value = tally.get(name)
        if value is not None:
            for key in row.keys:
                tally.put(key, value, name)


def _outcomes(tally: Tally) -> Iterator[FlagOutcome]:
    for name, given in tally.given.items():
        row = given.row
        fate, what = row.fate, row.why
        if not tally.is_given(name):
            fate, what = "not needed", f"it does nothing without {row.needs}"
        elif fate == "taken":
            fate, what = tally.fates.get(name, ("not needed", what))
        elif given.value == row.default:
            fate, what = "not needed", "with this value it does nothing"
        yield FlagOutcome(given.written, fate, what)
    yield from (FlagOutcome(*other) for other in tally.others)


def _faults(tally: Tally, text: str) -> list[str]:
    worded = []
    for source, line in faults_of(TrainSettings, parse_toml(text), "", tally.made_of):
        if not source:
            # A fault between settings, which names them.
            words = re.findall(r"\w+", line)
            made_of = (made for key, made in tally.made_of.items() if key.rpartition(".")[2] in words)
            source = ", ".join(dict.fromkeys(made_of)) or "together"
        worded.append(f"{source}: {line}")
    return worded


def _place(key: str) -> tuple[bool, int, int]:
    """Where a key is in the file: before all tables, or in the order of the tree; within a model, in the
    order in which it was written."""
    table, _, leaf = key.partition(".")
    tables = TrainSettings.model_fields
    below = getattr(tables[table].annotation, "model_fields", {})
    return bool(leaf), list(tables).index(table), list(below).index(leaf) if leaf in below else 0


def _text(tally: Tally, outcomes: Sequence[FlagOutcome]) -> str:
    """The file: a comment at its head for all that is missed, and beside each setting its flags."""
    missed = [f"{one.fate}: {one.flag}: {one.what}" for one in outcomes if one.fate in ("lacking", "unknown")]
    missed += [f"note: {note}" for note in tally.absent]
    document = tomlkit.document()
    for line in ("Made by `stretto convert --megatron`.", *([""] if missed else []), *missed):
        document.add(tomlkit.comment(_printable(line)))
    for key, value in sorted(tally.values.items(), key=lambda item: _place(item[0])):
        *tables, leaf = key.split(".")
        below: Any = document
        for part in tables:
            if part not in below:
                below.add(part, tomlkit.table(is_super_table=part != tables[-1]))
            below = below[part]
        below.add(leaf, tomlkit.item(value).comment(_printable(tally.made_of[key])))
    return tomlkit.dumps(document)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)

"""Files as a stranger or a failing disk hands them over: damaged at random, and given to what reads them.

    python -m tests.strangers --count 2000 --seed 0    # the figures, in one process

Each try takes one sound file of a kind, damages it, and calls what reads that kind. Nothing but an error of
Stretto's own, in one message, may come of it: no traceback, no process, no file written outside of the folder
that was named, no connection. An audit hook of the interpreter watches.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.config import load_settings
from stretto.errors import StrettoError
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.models.pretrained import load_gpt, save_gpt
from stretto.price.calibration import save_calibration
from stretto.schedule.csv import write_csv
from stretto.schedule.families import make_schedule
from stretto.train.trainer import Trainer
from stretto.train.whole import load_whole
from stretto.train.world import World
from tests.price.test_calibration import calibration
from tests.train.tiny import write_settings

MOST_S = 120.0
"""A try that takes longer hangs."""

NUMBERS = (
    *(0, -1, 1, 3, 10**6, 10**9, 2**31, 2**63 - 1, 2**63, 10**30, "1" + "0" * 5000, 1e308, -1e-300, 0.5),
    *("NaN", "Infinity", "-Infinity", "1e999", "0x10", "007"),
)
TEXTS = (
    *("", ".", "..", "../../../etc/passwd", "/etc/passwd", "a/../../b", "~/x", "nul\\u0000l", "\\ud800"),
    *("__import__('os').system('touch ran')", "cos\nsystem\n", "${HOME}", "%s%n", "é" * 300, "x" * 70_000),
    *("aten.from_file.default", "torch.load", "file:///etc/passwd", "-1", "inf", "nan", "²", "ﬁ"),
)
OTHERS = ("null", "true", "[]", "{}", "[" * 50_000, "[" * 20 + "]" * 20, '{"a":1,"a":2}')


def _value(draw: random.Random) -> str:
    """The text of a value that is not expected."""
    kind = draw.randrange(3)
    if kind == 0:
        return str(draw.choice(NUMBERS))
    if kind == 1:
        return json.dumps(draw.choice(TEXTS)) if draw.random() < 0.8 else '"' + draw.choice(TEXTS) + '"'
    return draw.choice(OTHERS)


def _bytes(draw: random.Random, data: bytes) -> bytes:
    """As a disk, a cable or an editor damages any file."""
    content, how = bytearray(data), draw.randrange(8)
    at = draw.randrange(len(content) or 1)
    length = min(draw.choice((1, 7, 300)), len(content) - at)
    if how == 0 and content:
        content[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        del content[at:]
    elif how == 2:
        del content[at : at + length]
    elif how == 3:
        content[at:at] = content[at : at + length] * draw.choice((1, 2, 50))
    elif how == 4:
        content[at : at + length] = draw.randbytes(length)
    elif how == 5:
        content[at:at] = draw.choice(
            (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\x1b[2J", b"\xed\xa0\x80")
        )
    elif how == 6:
        content[at : at + length] = bytes(length)
    else:
        content = bytearray(draw.choice((b"", b"\n", bytes(4096), b"PK\x03\x04", b"\x80\x05.")))
    return bytes(content)


_WORD = re.compile(rb'-?\b\d[\d.e+-]*|"[^"\n]*"|\b(?:true|false|null)\b')
_LINE = re.compile(rb"[^\n]*\n")


def _text(draw: random.Random, data: bytes) -> bytes:
    """As one who edits damages a text: a value or a key is another, a line is gone, twice, or elsewhere."""
    if draw.random() < 0.25:
        lines = _LINE.findall(data) or [data]
        line, at = draw.choice(lines), draw.randrange(len(lines))
        return b"".join([*lines[:at], *[line] * draw.choice((0, 1, 1, 3)), *lines[at + 1 :]])
    words = list(_WORD.finditer(data))
    if not words:
        return _bytes(draw, data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        one = draw.choice(words)
        put = draw.choice(words)[0] if draw.random() < 0.4 else _value(draw).encode("utf-8", "surrogatepass")
        data = data[: one.start()] + put + data[one.end() :]
        words = list(_WORD.finditer(data)) or words[:0]
        if not words:
            break
    return data


_CELLS = (
    "0F0",
    "99F0",
    "0F999999999",
    "123456789012345678F1",
    "-1F0",
    "(0F0;0F0)OVERLAP_F_B",
    "0B0",
    "1W7",
    "²F0",
)


def _cells(draw: random.Random, data: bytes) -> bytes:
    rows = [row.split(b",") for row in data.splitlines()]
    row = draw.choice(rows)
    row[draw.randrange(len(row))] = draw.choice(_CELLS).encode()
    return b"\n".join(b",".join(row) for row in rows)


def damaged(draw: random.Random, name: str, data: bytes) -> bytes:
    """One damage of a file."""
    if name.endswith(".csv") and draw.random() < 0.5:
        return _cells(draw, data)
    text = name.endswith((".json", ".toml", ".csv", ".txt", ".jsonl", "latest"))
    return _text(draw, data) if text and draw.random() < 0.7 else _bytes(draw, data)


# What is done outside of what was asked.


@dataclass
class Watch:
    """done: what was, while it watches, that must not be. folder: where files may be written."""

    folder: Path
    on: bool = False
    done: list[str] = field(default_factory=list)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, mode, flags = (*args, None, None, None)[:3]
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and isinstance(path, str | bytes | os.PathLike):
                self._written(event, path)
        elif event in (
            "os.mkdir",
            "os.rename",
            "os.remove",
            "os.rmdir",
            "os.link",
            "os.symlink",
            "os.truncate",
        ):
            self._written(event, args[0])
        elif event in ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork"):
            self.done.append(f"{event} {args[:2]}")
        elif event in ("socket.connect", "socket.getaddrinfo"):
            self.done.append(f"{event} {args}")

    def _written(self, event: str, path: Any) -> None:
        place = os.path.realpath(os.fsdecode(path)) if not isinstance(path, int) else ""
        if place and place != os.devnull and not place.startswith(f"{self.folder}{os.sep}"):
            self.done.append(f"{event} {place}")


class TooLong(BaseException):
    pass


@contextmanager
def _limit() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# What reads which files.

Read = Callable[[Path, Path], None]
"""(the damaged file or folder, a folder to write into)."""


def command(*arguments: str) -> Read:
    """A command line, in which PATH is the file and OUT a folder."""

    def read(path: Path, out: Path) -> None:
        words = [one.replace("PATH", str(path)).replace("OUT", str(out)) for one in arguments]
        ended = CliRunner().invoke(app, words, catch_exceptions=True)
        error = ended.exception
        if error is not None and not isinstance(error, SystemExit):
            raise error

    return read


@dataclass
class Kind:
    """sound: a file, or a folder of which one file is damaged. readers: what reads it."""

    sound: Path
    readers: tuple[Read, ...]
    weight: int = 1


PLAN: tuple[Read, ...] = (
    command("verify", "PATH"),
    command("simulate", "PATH", "--json", "OUT/t.json"),
    command("show", "PATH", "--stage", "0", "--phase", "B"),
    command("cost", "PATH"),
    command("report", "PATH", "-o", "OUT/r.html"),
    command("rehearse", "PATH", "--rank", "0", "--steps", "1"),
    command("calibrate", "PATH", "--ops-only", "--device", "cpu", "-o", "OUT/c.json"),
)


def corpus(folder: Path) -> dict[str, Kind]:
    """Sound files of all kinds."""
    folder.mkdir(parents=True, exist_ok=True)
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=8))
    job = stretto.capture(
        model,
        torch.zeros(4, 9, dtype=torch.int64),
        next_token_loss,
        stretto.Parallel(pp=2, tp=2, microbatches=2),
    )
    plan = stretto.plan(job, stretto.Cluster())
    plan.save(folder / "plan.json")
    write_csv(make_schedule("zb-h1", 3, 5), folder / "schedule.csv")
    save_calibration(calibration(), folder / "calibration.json")
    (folder / "cluster.toml").write_text(
        'device = "h100"\ncount = 64\nnode_devices = 8\n[figures]\nnic_gbit = 200\npeak_tflops = 900.5\n'
        "[measured]\nnccl_tests = []\n"
    )
    (folder / "flat.toml").write_text("".join(f"{key} = {value!r}\n" for key, value in FLAT.items()))
    (folder / "weights").mkdir()
    save_gpt(model, folder / "weights")
    settings = write_settings(folder / "runs", steps=2, every=1, run="run")
    Trainer(load_settings(settings), World()).run()
    run = folder / "runs" / "run"
    shutil.copy(settings, folder / "settings.toml")

    def settings_of(path: Path, out: Path) -> None:
        load_settings(path)

    def whole(path: Path, out: Path) -> None:
        load_whole(path / "step-000002")

    def weights(path: Path, out: Path) -> None:
        load_gpt(path)

    return {
        "plan": Kind(folder / "plan.json", PLAN, 6),
        "schedule": Kind(
            folder / "schedule.csv",
            (
                command("verify", "PATH"),
                command("schedule", "--csv", "PATH", "--times", "F=1,I=1,W=1,message=0.1"),
                command("schedule", "--csv", "PATH", "-o", "OUT/s.svg"),
            ),
            3,
        ),
        "settings": Kind(folder / "settings.toml", (settings_of,), 4),
        "cluster": Kind(folder / "cluster.toml", (command("cluster", "show", "PATH"),), 2),
        "flat cluster": Kind(folder / "flat.toml", (command("cluster", "show", "PATH"),), 1),
        "calibration": Kind(folder / "calibration.json", (command("cluster", "show", "PATH"),), 3),
        "checkpoint": Kind(run / "checkpoints", (command("export", "PATH", "-o", "OUT/exported"), whole), 5),
        "run": Kind(run, (command("report", "PATH", "-o", "OUT/r.html"), command("cost", "PATH")), 2),
        "weights": Kind(folder / "weights", (weights,), 1),
    }


FLAT = {"flops_per_us": 1e6, "memory_bytes_per_us": 1e4, "latency_us": 50.0, "memory_bytes": 10**9}


@dataclass
class Told:
    """How many tries ended how, and what went wrong: (kind, file, what)."""

    tries: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    peak_bytes: int = 0


_WATCHES: list[Watch] = []


def try_files(
    kinds: dict[str, Kind], count: int, seed: int, folder: Path, say: Callable[[str], None]
) -> Told:
    """Damage and read so many files. folder: where damaged ones are, and where may be written."""
    told, draw = Told(), random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    folder = Path(os.path.realpath(folder))
    watch = Watch(folder)
    if not _WATCHES:
        sys.addaudithook(lambda event, args: _WATCHES[-1](event, args))
    _WATCHES[:] = [watch]
    names = [name for name, kind in kinds.items() for _ in range(kind.weight)]
    for number in range(count):
        name = draw.choice(names)
        kind = kinds[name]
        place, out = folder / "in", folder / "out"
        for one in (place, out):
            shutil.rmtree(one, ignore_errors=True)
            one.mkdir()
        path = place / kind.sound.name
        if kind.sound.is_dir():
            shutil.copytree(kind.sound, path)
            file = draw.choice(sorted(one for one in path.rglob("*") if one.is_file()))
        else:
            shutil.copy(kind.sound, path)
            file = path
        file.write_bytes(damaged(draw, file.name, file.read_bytes()))
        reader = draw.choice(kind.readers)
        began = time.monotonic()
        how = "read"
        watch.done.clear()
        try:
            with _limit():
                watch.on = True
                try:
                    reader(path, out)
                finally:
                    watch.on = False
        except StrettoError as error:
            how = "refused"
            if "Traceback" in str(error):
                told.wrong.append((name, f"{number} {file.name}", f"a traceback in the message: {error}"))
        except TooLong:
            told.wrong.append((name, f"{number} {file.name}", f"not at its end after {MOST_S:.0f} s"))
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-3:])
            told.wrong.append((name, f"{number} {file.name}", where))
        for done in watch.done:
            told.wrong.append((name, f"{number} {file.name}", done))
        if told.wrong and told.wrong[-1][1].startswith(f"{number} "):
            kept = folder / "wrong" / str(number)
            shutil.copytree(place, kept, dirs_exist_ok=True)
            say(f"{told.wrong[-1]}")
        told.tries[name] += 1
        told.refused[name] += how == "refused"
        told.slowest_s = max(told.slowest_s, time.monotonic() - began)
    told.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return told


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    kinds = corpus(given.folder / "sound")
    if given.only:
        kinds = {name: kinds[name] for name in given.only.split(",")}
    told = try_files(
        kinds, given.count, given.seed, given.folder / "tries", lambda line: print(line, flush=True)
    )
    for name, count in told.tries.items():
        print(f"{name:14}{count:6} tried{told.refused[name]:6} refused")
    print(f"{len(told.wrong)} wrong, slowest {told.slowest_s:.1f} s, peak {told.peak_bytes / 1e9:.2f} GB")
    sys.exit(bool(told.wrong))


if __name__ == "__main__":
    main()

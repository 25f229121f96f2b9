"""Files as a stranger or a failing disk hands them over: damaged at random, and given to what reads them.

    python -m tests.strangers FOLDER

Each try takes one sound file of a kind, damages it, and calls what reads that kind. Nothing but an error of
Stretto's own, in one message, may come of it: no traceback, no process, no file written outside of the folder
that was named, no connection. An audit hook of the interpreter watches.
"""

from __future__ import annotations

import os
import random
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

from stretto.errors import StrettoError
from stretto.saving import digests
from tests.damage import damaged
from tests.damage_corpus import Kind, corpus, resealed

MOST_S = 120.0
"""A try that takes longer hangs."""

WRITES = {f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate")}
STARTS = {f"os.{name}" for name in ("system", "exec", "posix_spawn", "spawn", "fork")} | {
    *("subprocess.Popen", "socket.connect", "socket.getaddrinfo"),
}


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
        elif event in WRITES:
            self._written(event, args[0])
        elif event in STARTS:
            self.done.append(f"{event} {args[:2]}")

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


@dataclass
class Told:
    """How many tries ended how, and what went wrong: (kind, file, what)."""

    tries: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    peak_bytes: int = 0


_WATCHES: list[Watch] = []


def make_damaged(draw: random.Random, kinds: dict[str, Kind], place: Path) -> tuple[str, Path, Path]:
    """In a folder. Returns the kind, what is to be read, and which file of it is damaged."""
    name = draw.choice([name for name, kind in kinds.items() for _ in range(kind.weight)])
    sound = kinds[name].sound
    path = place / sound.name
    if sound.is_dir():
        shutil.copytree(sound, path)
        file = draw.choice(sorted(one for one in path.rglob("*") if one.is_file()))
    else:
        file = Path(shutil.copy(sound, path))
    file.write_bytes(damaged(draw, file.name, file.read_bytes()))
    if (file.parent / digests.NAME).exists() and file.name != digests.NAME and draw.random() < 0.6:
        resealed(file.parent)
    return name, path, file


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
    for number in range(count):
        place, out = folder / "in", folder / "out"
        for one in (place, out):
            shutil.rmtree(one, ignore_errors=True)
            one.mkdir()
        name, path, file = make_damaged(draw, kinds, place)
        kind = kinds[name]
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


def main(folder: Path, count: int = 2000) -> None:
    told = try_files(
        corpus(folder / "sound"), count, 0, folder / "tries", lambda line: print(line, flush=True)
    )
    for name, tried in told.tries.items():
        print(f"{name:14}{tried:6} tried{told.refused[name]:6} refused")
    print(f"{len(told.wrong)} wrong, slowest {told.slowest_s:.1f} s, peak {told.peak_bytes / 1e9:.2f} GB")
    sys.exit(bool(told.wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

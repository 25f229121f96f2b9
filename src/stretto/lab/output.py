"""Prints what hosts say, line by line, with `[host 0] ` before each. Touches only the streams it is given."""

from __future__ import annotations

from typing import BinaryIO, TextIO

_CLEAR = b"\r\x1b[K"  # to the line's start, and erase to its end


class _Decoded:
    """Takes bytes for a stream of text, as notebooks give in the place of `sys.stdout`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.flush = stream.flush

    def write(self, text: bytes) -> int:
        return self._stream.write(text.decode(errors="replace"))


class Screen:
    """One output stream that the hosts share; keeps a progress line separate from whole lines.

    A progress line is text that ends with a carriage return, as progress bars print it. On a terminal
    rank 0's is shown in place and gives way to whole lines; elsewhere carriage returns are plain characters.
    """

    @staticmethod
    def of(stream: TextIO) -> Screen:
        """A screen on `sys.stdout` or its like: by bytes if it has them, since hosts may print anything."""
        stream.flush()
        return Screen(getattr(stream, "buffer", None) or _Decoded(stream), stream.isatty())

    def __init__(self, stream: BinaryIO | _Decoded, terminal: bool) -> None:
        self.terminal = terminal
        self._stream = stream
        self._progress_shown = False

    def line(self, text: bytes) -> None:
        """Print a whole line; `text` brings its newline."""
        self._stream.write((_CLEAR if self._progress_shown else b"") + text)
        self._stream.flush()
        self._progress_shown = False

    def progress(self, text: bytes) -> None:
        """Show a line that the next one replaces."""
        self._stream.write(_CLEAR + text)
        self._stream.flush()
        self._progress_shown = True


class Prefixer:
    """Cuts one stream of one rank into lines and prints each with its name: by default the host's number."""

    def __init__(self, screen: Screen, rank: int, name: str | None = None) -> None:
        self._screen = screen
        self._rank = rank
        self._prefix = f"[{name or f'host {rank}'}] ".encode()
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take what the host printed; an unfinished line waits for its end."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._whole(line)
        if self._screen.terminal and b"\r" in self._rest:
            # Only the newest progress counts; what follows the last carriage return is not complete yet.
            done, _, self._rest = self._rest.rpartition(b"\r")
            shown = done.rpartition(b"\r")[2]
            if shown and self._rank == 0:
                self._screen.progress(self._prefix + shown)

    def close(self) -> None:
        """Print what the host left without a newline at its end."""
        if self._rest:
            self._whole(self._rest)
            self._rest = b""

    def _whole(self, line: bytes) -> None:
        if self._screen.terminal:
            line = line.rstrip(b"\r").rpartition(b"\r")[2]
        self._screen.line(self._prefix + line + b"\n")

"""Prints what ranks say, line by line, with `[host 0] ` before each. Touches only the streams it is given."""

from __future__ import annotations

import threading
from typing import IO, TextIO

_ONE_AT_A_TIME = threading.Lock()


class Printer(threading.Thread):
    """Reads a rank's stream to its end. kept: lines are kept there, and not printed.

    error: why nothing more could be printed; None so far.
    """

    def __init__(self, source: IO[bytes], target: TextIO, name: str, kept: list[str] | None = None) -> None:
        super().__init__(name=f"stretto lab: {name}", daemon=True)
        self._source, self._target, self._prefix = source, target, f"[{name}] "
        self.kept = kept
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        with self._source:
            for line in self._source:
                # Hosts may print anything, and the last line may have no end.
                text = self._prefix + line.decode(errors="replace").rstrip("\n") + "\n"
                if self.kept is not None:
                    self.kept.append(text)
                    continue
                try:
                    with _ONE_AT_A_TIME:
                        self._target.write(text)
                        self._target.flush()
                except Exception as error:
                    self.error = error
                    return

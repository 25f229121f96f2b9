"""What people see while something takes long: a line at least every two seconds, from a thread of its own.

What works says where it is whenever it likes (`now`). The thread tells it again with the time, also where the
work is inside a library or in one long simulation and says nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

TELL_S = 2.0
"""Seconds between two lines."""


class Waiting:
    """While it is entered, tells `say` every `tell_s` seconds what goes on.

    The first line comes after that time: what is done sooner needs none. `say` is called from another thread.
    """

    def __init__(self, say: Callable[[str], None], what: str, tell_s: float = TELL_S) -> None:
        """what: in a word, what is being done."""
        self._say = say
        self._line = self._what = what
        self._tell_s = tell_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="waiting", daemon=True)

    def now(self, line: str) -> None:
        """What goes on from now on."""
        self._line = f"{self._what}: {line}"

    def __enter__(self) -> Waiting:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._over.wait(self._tell_s):
            self._say(f"{self._line} ({time.monotonic() - self._began_s:.0f} s)")

"""Becomes a command inside a host: run as a program, with nothing but the standard library.

    python -I -S enter.py NAMESPACE GROUP CORES PARENT COMMAND...

A program of its own, not code between fork and exec: the lab may live in a process with threads, where
such code can deadlock. GROUP and CORES may be empty. Ends with 126 if it cannot enter, 127 if there is no
such command, as shells do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CLONE_NEWNET = 0x40000000  # <linux/sched.h>
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(namespace: str, group: str, cores: str, parent: str, *command: str) -> int:
    """Enter and execute; returns only on failure, with the exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    # The lab has stop signals back while it starts a command; the command must get them.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        # If the lab is killed with SIGKILL, no one is left to clean up, but its hosts do not outlive it.
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl failed")
        if os.getppid() != int(parent):
            return 126  # the lab died before the line above
        if group:
            with open(group, "w") as file:
                file.write(str(os.getpid()))
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    except OSError as error:
        print(f"stretto lab: cannot enter the host: {error}", file=sys.stderr)
        return 126
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"stretto lab: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Turns itself into another program that does not outlive its parent.

Run as a script (`python -I -S guard.py PARENT SIGNAL UID GID COMMAND...`), never
imported: it starts before anything else of ours. On Linux the kernel sends SIGNAL
when the parent dies, even by kill -9. The order matters: a change of user forgets
that wish, so it is made after it. UID and GID `-` keep the user.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Drops to the user, ties itself to its parent, becomes COMMAND."""
    parent, signal_number, uid, gid, *command = sys.argv[1:]
    if uid != "-":
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number))
        if os.getppid() != int(parent):  # it died before the wish was made
            os._exit(1)
    os.execv(command[0], command)


main()

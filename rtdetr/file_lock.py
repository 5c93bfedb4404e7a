"""Locks between processes, which end with the process that holds them."""

from __future__ import annotations

import fcntl


def lock(descriptor: int, wait: bool = False) -> bool:
    """Locks an open file or folder until it is closed; False if another process holds it, unless `wait`. File systems
    without locks give no protection."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # no locks, as on NFS
        return True
    return True

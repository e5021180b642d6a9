"""A lock on a run folder: two processes never write the same run.

It is an operating-system lock on the file ``.lock``, which ends with the process that holds it, however that process
ends. The file names the process, and is removed when the lock is released.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lastlayer.runs.files import RunError

NAME = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if need be; raise a RunError if another process holds it.

    Temporary files of a process that was killed while it wrote are removed.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _take(path)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror}.") from None
    try:
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        for old in [*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")]:
            old.unlink(missing_ok=True)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _take(path: Path) -> int:
    """Return the open file with the lock; a file that was removed in the meantime is opened again."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BlockingIOError:
            owner = os.read(file, 200).decode("utf-8", "replace") or "another process"
            os.close(file)
            raise RunError(f"{path.parent}: in use by {owner}. Wait for it, or choose another folder.") from None
        except FileNotFoundError:  # removed between the two looks
            pass
        os.close(file)


def _lock(file: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except PermissionError:
            raise BlockingIOError from None
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

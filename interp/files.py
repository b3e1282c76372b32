"""Files that are whole or not there, whatever happens to their writer.

A file is written under a ``.partial`` name in its own folder, flushed to the disk, and renamed.
While its writer lives the partial file is locked (``flock``, which the system lifts however the
writer dies), so that the next run can tell work in progress from a leftover.
"""

import errno
import fcntl
import os
import secrets
from pathlib import Path
from types import TracebackType

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


class PartialFile:
    """A file in the making. Leaving the ``with`` without ``commit`` removes it.

    Opening raises ``BlockingIOError`` where a living process is writing the same partial file, and
    another ``OSError`` where the file cannot be made. On a file system without locks it is not
    locked.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = _open_locked(path)

    def commit(self, content: bytes, target: Path) -> None:
        """Write the content, flush it, and give the file its final name."""
        os.ftruncate(self._descriptor, 0)
        left = memoryview(content)
        while left:
            left = left[os.write(self._descriptor, left) :]
        os.fsync(self._descriptor)
        os.replace(self.path, target)

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _is_same_file(self._descriptor, self.path):
            self.path.unlink()
        os.close(self._descriptor)


def unique_partial(target: Path) -> Path:
    """A partial name for ``target`` that no other writer uses."""
    return target.with_name(f"{target.stem}.{secrets.token_hex(4)}.partial")


def write_atomically(target: Path, content: bytes | str) -> None:
    """Write a whole file at once. Raises ``OSError`` and leaves what was there before."""
    encoded = content.encode() if isinstance(content, str) else content
    with PartialFile(unique_partial(target)) as file:
        file.commit(encoded, target)


def remove_leftovers(folder: Path) -> int:
    """Delete the partial files of a folder whose writers are dead; returns how many."""
    removed = 0
    for path in folder.glob("*.partial"):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # renamed or removed since it was listed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue  # somebody is writing it, or nobody here can tell
        # from here on only this process may rename or delete it
        if _is_same_file(descriptor, path):
            path.unlink()
            removed += 1
        os.close(descriptor)
    return removed


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(descriptor)
                raise
        # between opening and locking, its last owner may have renamed or deleted it
        if _is_same_file(descriptor, path):
            return descriptor
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_ino, here.st_dev) == (there.st_ino, there.st_dev)

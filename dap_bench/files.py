"""Files that are whole or not there: the one atomic writer of the project, and what killed writers leave behind."""

import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from dap_bench.errors import UserError

ABANDONED = 24 * 3600  # seconds after which a draft of another machine is taken for dead


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft that becomes `path` in one step when the block ends well, and is gone when it does not.

    Args:
        path: The file to write or replace.

    Yields:
        The draft's path, to be written to.

    Raises:
        UserError: If the file cannot be written.
    """
    with drafting(path.parent) as draft:
        yield draft
        with explained(path):
            os.replace(draft, path)


@contextmanager
def drafting(folder: Path) -> Iterator[Path]:
    """A temporary file in `folder`, on disk when the block goes on after writing it, gone when the block ends.

    Args:
        folder: The folder; it is made if need be.

    Yields:
        The draft's path, to be written to.

    Raises:
        UserError: If the folder cannot be written to.
    """
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    draft = draft_in(folder)
    try:
        with explained(folder):
            yield draft
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def draft_in(folder: Path) -> Path:
    """A name that says whose draft it is.

    Args:
        folder: The folder of the draft.

    Returns:
        A new path, with the machine and the process in its name.
    """
    return folder / f".{socket.gethostname()}.{os.getpid()}.{uuid4().hex[:8]}.tmp"


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step.

    Args:
        path: The file to write or replace.
        text: Its content.

    Raises:
        UserError: If the file cannot be written.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
        flush(draft)


def flush(path: Path) -> None:
    """Have a file's content on disk before it gets its name.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Remove the drafts that killed processes left: of this machine if the process is gone, of others after a day.

    Args:
        folder: The folder to clean up.
    """
    for draft in folder.glob(".*.tmp"):
        *host, process, _, _ = draft.name[1:].split(".")
        with suppress(OSError, ValueError):
            here = ".".join(host) == socket.gethostname()
            if (here and not _alive(int(process))) or time.time() - draft.stat().st_mtime > ABANDONED:
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a sentence.

    Args:
        path: The file or folder that is worked on, for the message.

    Raises:
        UserError: In place of an OSError inside the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                f"the disk is full at {path}; rows so far are safe: free some space and repeat the same command."
            ) from error
        raise UserError(f"{path} cannot be written ({error.strerror or error}); choose another folder.") from error

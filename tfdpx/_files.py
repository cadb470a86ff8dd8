"""Writes files as a whole or not at all, locks folders, and detects changed files by a digest."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets

_DIGEST = "digest"


class DiskError(OSError):
    """Raised if a file of a finished run cannot be written; the message tells how to fix it."""


def make_folder(path):
    """Makes a folder that only its owner can read, and checks that files can be written to it.

    Args:
        path: `pathlib.Path` of the folder; it may exist.

    Raises:
        OSError: If the folder cannot be made or written to. The message has the path and the
            reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        os.chmod(path, 0o700)
        probe = path / f".{secrets.token_hex(4)}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OSError(
            error.errno,
            f"Nothing can be saved in {os.fspath(path)!r}: {error}. Use a folder that can be "
            "written to",
        ) from error


@contextlib.contextmanager
def replacing(path, mode=0o600):
    """Yields a temporary file, which replaces the file `path` at the end of the `with` block.

    The old file remains until all of the new one is on the disk, so `path` is never half a file,
    even after a crash. If the block raises, the old file remains.

    Args:
        path: `pathlib.Path` of the file to write.
        mode: Int, the permissions of the new file, before the process's umask.

    Yields:
        `pathlib.Path` of the temporary file. It is empty, in the same folder as `path`, and has the
        same suffix.
    """
    # The name is unique: if two processes write the same file, one complete version remains.
    fresh = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.new{path.suffix}")
    try:
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield fresh
        _flush(fresh)
        os.replace(fresh, path)
    except BaseException:  # Partial files would take more space on a disk that may be full.
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    _flush(path.parent)


def write(path, content, mode=0o600):
    """Writes bytes to a file, as a whole or not at all; see `replacing`."""
    with replacing(path, mode) as fresh:
        fresh.write_bytes(content)


def leftovers(folder):
    """Returns a list of the temporary files in a folder that killed processes have left."""
    return list(folder.glob(".*.new*"))


@contextlib.contextmanager
def locked(folder, user="Another training uses the checkpoint folder"):
    """Holds an exclusive lock on a folder during the `with` block.

    Args:
        folder: `pathlib.Path` of an existing folder.
        user: String, the beginning of the error, which tells who already uses the folder.

    Yields:
        Int, the file descriptor of the lock, or None on a file system without locks. A process that
        inherits the descriptor holds the lock, too.

    Raises:
        RuntimeError: If another process holds the lock.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"{user} {os.fspath(folder)!r}: wait until it has ended, or give this one a "
                "separate folder."
            ) from None
        except OSError:  # No locks here. Concurrent writers would still leave complete files.
            yield None
        else:
            yield handle
    finally:
        os.close(handle)


def _flush(path):
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sealed(record, indent=None):
    """Returns the JSON of a dict as bytes, with a digest of the content that `opened` checks.

    Args:
        record: Dict of JSON values.
        indent: Int, the indentation of the JSON in spaces; None for a single line.
    """
    return json.dumps({**record, _DIGEST: _digest_of(record)}, indent=indent).encode()


def opened(content, form):
    """Checks the digest of bytes that `sealed` returned, and returns the dict in them.

    Args:
        content: Bytes, as `sealed` returned them.
        form: String, the required value of the dict's entry "format".

    Raises:
        ValueError: If the content was changed or has another format. The message tells the reason.
    """
    try:
        record = json.loads(content, object_pairs_hook=without_twins)
    except RecursionError:
        raise ValueError("it is no JSON that was saved here") from None
    file_format = record.get("format") if isinstance(record, dict) else type(record).__name__
    if file_format != form:
        raise ValueError(f"its format is {file_format!r}, not {form!r}")
    if record.pop(_DIGEST, None) != _digest_of(record):
        raise ValueError("it is not what was saved: its content does not fit its digest")
    return record


def without_twins(pairs):
    """Returns the dict of a JSON object; raises ValueError if a key occurs twice.

    Some programs that read JSON use the first value of such a key, others the last one.

    Args:
        pairs: List of (key, value), as `json.loads` passes them to its `object_pairs_hook`.
    """
    if len(record := dict(pairs)) < len(pairs):
        raise ValueError("it has an entry twice")
    return record


def digest_of(content):
    """Returns the BLAKE2b hash of bytes as a hexadecimal string."""
    return hashlib.blake2b(content).hexdigest()


def _digest_of(record):
    return digest_of(json.dumps(record, sort_keys=True).encode())

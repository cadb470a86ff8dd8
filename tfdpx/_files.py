"""Files that are written as a whole or not at all, with digests that detect changes."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets

_DIGEST = "digest"


class DiskError(OSError):
    """Raised where a file of a finished run cannot be written; the message has the remedy."""


def make_folder(path):
    """Makes a folder that only its owner can read, and checks that files can be written to it.

    Args:
        path: `pathlib.Path`.

    Raises:
        OSError: If this fails, with the path and the reason.
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
    """Yields a new file that then replaces `path`, as a whole or not at all.

    The former file stays until the new one is on the disk.

    Args:
        path: `pathlib.Path`.
        mode: Int, the permissions, as far as the process's mask allows.

    Yields:
        `pathlib.Path` of an empty file in the same folder, with the same suffix, to write to.
    """
    # A unique name: two processes may write the same file, and the last one stays whole.
    fresh = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.new{path.suffix}")
    try:
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield fresh
        _flush(fresh)
        os.replace(fresh, path)
    except BaseException:  # Partial files would fill a full disk further.
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    _flush(path.parent)


def write(path, content, mode=0o600):
    """Writes bytes to a file like `replacing`: as a whole or not at all."""
    with replacing(path, mode) as fresh:
        fresh.write_bytes(content)


def leftovers(folder):
    """Returns the files that were left when a process was killed while writing, a list."""
    return list(folder.glob(".*.new*"))


@contextlib.contextmanager
def locked(folder, user="Another training uses the checkpoint folder"):
    """Locks a folder: no other process locks it at the same time.

    Args:
        folder: `pathlib.Path` of an existing folder.
        user: String for the error that names the other user of the folder.

    Yields:
        Int, a file descriptor that holds the lock in every process that inherits it; None on a file
        system without locks.

    Raises:
        RuntimeError: If another process has locked it.
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
        except OSError:  # Ignored: concurrent writers still leave a whole file.
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
    """Returns a dict of JSON values as bytes that `opened` can check; indented for people."""
    return json.dumps({**record, _DIGEST: _digest_of(record)}, indent=indent).encode()


def opened(content, form):
    """Returns the dict that was passed to `sealed`.

    Args:
        content: Bytes.
        form: String, the required entry "format".

    Raises:
        ValueError: If the content differs, with the reason.
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
    """Returns a dict of JSON; refuses a repeated entry, as readers would differ on it."""
    if len(record := dict(pairs)) < len(pairs):
        raise ValueError("it has an entry twice")
    return record


def digest_of(content):
    """Returns a string that identifies bytes."""
    return hashlib.blake2b(content).hexdigest()


def _digest_of(record):
    return digest_of(json.dumps(record, sort_keys=True).encode())

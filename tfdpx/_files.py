"""Files that are there whole or not at all, and that tell whether they are what was written."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets

_DIGEST = "digest"


def make_folder(path):
    """Makes a folder that its owner alone can read, and shows that files can be written to it.

    Args:
        path: `pathlib.Path`.

    Raises:
        OSError: If that cannot be done, with the path and the reason.
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
            f"Nothing can be saved in {os.fspath(path)!r}: {error}. Give a folder that can be "
            "written to",
        ) from error


@contextlib.contextmanager
def replacing(path, mode=0o600):
    """Within it a file is written, which then takes the place of `path`, whole or not at all.

    What was there before stays until the new file is on the disk.

    Args:
        path: `pathlib.Path`.
        mode: Int, who may read it, as far as the process's mask allows.

    Yields:
        `pathlib.Path` of an empty file in the same folder, with the same suffix, to be written to.
    """
    # A name of its own: two processes may write the same file, and the last one stays whole.
    fresh = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.new{path.suffix}")
    try:
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield fresh
        _flush(fresh)
        os.replace(fresh, path)
    except BaseException:  # A full disk is not made fuller by halves of files.
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    _flush(path.parent)


def write(path, content, mode=0o600):
    """Writes bytes to a file as `replacing` does: whole or not at all."""
    with replacing(path, mode) as fresh:
        fresh.write_bytes(content)


def leftovers(folder):
    """List of the files that a kill left while they were written."""
    return list(folder.glob(".*.new*"))


@contextlib.contextmanager
def locked(folder, user="Another training uses the checkpoint folder"):
    """Within it no other process enters the same folder so.

    Args:
        folder: `pathlib.Path` of a folder that is there.
        user: String for the error, who else uses it.

    Yields:
        Int, a file descriptor that holds the lock in every process that inherits it; None on a file
        system without locks.

    Raises:
        RuntimeError: If another process is within.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"{user} {os.fspath(folder)!r}: wait until it has ended, or choose another folder."
            ) from None
        except OSError:  # No matter: two that write leave a whole file all the same.
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
    """A dict of JSON values as bytes that `opened` can check; indented for people to read."""
    return json.dumps({**record, _DIGEST: _digest_of(record)}, indent=indent).encode()


def opened(content, form):
    """The dict that `sealed` was given.

    Args:
        content: Bytes.
        form: String, what its entry "format" must be.

    Raises:
        ValueError: If it is anything else, with the reason.
    """
    try:
        record = json.loads(content, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError("it is no JSON that was saved here") from None
    found = record.get("format") if isinstance(record, dict) else type(record).__name__
    if found != form:
        raise ValueError(f"its format is {found!r}, not {form!r}")
    if record.pop(_DIGEST, None) != _digest_of(record):
        raise ValueError("it is not what was saved: its content does not fit its digest")
    return record


def _without_twins(pairs):
    """A dict of JSON. An entry that stands twice is read by people once, and not by the digest."""
    if len(record := dict(pairs)) < len(pairs):
        raise ValueError("it has an entry twice")
    return record


def digest_of(content):
    """String that identifies bytes."""
    return hashlib.blake2b(content).hexdigest()


def _digest_of(record):
    return digest_of(json.dumps(record, sort_keys=True).encode())

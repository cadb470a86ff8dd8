"""What a fit has released so far, on disk, so that an interrupted one continues from there.

A head learns of the data by its releases alone. So a fit that is begun again and is handed the same
noisy values goes the same way, without a pass for any of them, and draws fresh noise for what
follows. No secret is on disk and no noise is used twice, whatever the second fit is given.
"""

import contextlib
import io
import os

import numpy as np

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx.training.checkpoint import Checkpoint

_RELEASE = "tfdpx.Release/2"


class Journal:
    """The releases of one fit, in order, a file each; all are read and checked on entering.

    Args:
        checkpoint: `tfdpx.callbacks.Checkpoint`, whose folder is used.
        head: Dict of JSON values that another fit must share to continue from the folder.
        examples: `FeatureSource`; takes their number from the folder if it is not known yet.

    Raises:
        TypeError: If `checkpoint` is not a `Checkpoint`.
        ValueError: If the folder holds the fit of another head, or a damaged one.
        RuntimeError: If another fit or training uses the folder.
        OSError: If nothing can be saved in the folder.
    """

    def __init__(self, checkpoint, head, examples):
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                "Argument `checkpoint` must be a tfdpx.callbacks.Checkpoint. Received: "
                f"checkpoint={checkpoint!r}."
            )
        self._folder, self._examples = checkpoint.directory, examples
        self._head = head
        self._kept, self._next = [], 0
        self._open = contextlib.ExitStack()

    def __enter__(self):
        files.make_folder(self._folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(files.locked(self._folder))
            try:
                self._kept = self._read(self._head)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"The checkpoint in {os.fspath(self._folder)!r} cannot be continued: "
                    f"{error}. Restore the folder from a copy, or remove it to begin anew: what "
                    "was released from the data was still spent."
                ) from error
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._open.close()

    def recall(self, name, part):
        """The next release as it was, `(made, value)` as of `keep`, or None if it was not made.

        Raises:
            ValueError: If another one was.
        """
        if self._next == len(self._kept):
            return None
        self.check_examples()
        record, value = self._kept[self._next]
        if (record["name"], record["part"]) != (name, part):
            raise ValueError(
                f"The checkpoint in {os.fspath(self._folder)!r} has the release "
                f"{record['name']!r} of part {record['part']} where this fit makes {name!r} of "
                f"part {part}. It is of another version of tfdpx: remove it to begin anew."
            )
        self._next += 1
        return (record["run"], record["seeded"]), value

    def check_examples(self):
        """Raises ValueError unless the examples are as many as those of the releases before."""
        for record, _ in self._kept[:1]:
            if self._examples.count != record["examples"]:
                raise ValueError(
                    f"The checkpoint in {os.fspath(self._folder)!r} is of a fit to "
                    f"{record['examples']} examples. Received: {self._examples.count}."
                )

    def keep(self, name, part, made, value):
        """Writes a release down, before anything is computed from it.

        Args:
            name: Str.
            part: Int.
            made: The run that made it, an int, and whether a seed was given.
            value: Array.
        """
        record = {"format": _RELEASE, "name": name, "part": part}
        record |= {"run": made[0], "seeded": made[1]}
        record |= {"examples": self._examples.count, "number": len(self._kept)}
        content = io.BytesIO()
        np.save(content, value)
        record["digest of the array"] = files.digest_of(content.getvalue())
        self._kept.append((record, None))
        self._next = len(self._kept)
        path = self._folder / f"tfdpx-{self._next:09d}.release"
        files.write(path, files.sealed(record) + b"\n" + content.getvalue())

    def _read(self, head):
        path = self._folder / "fit.json"
        resumable.begin(path, head, "it is of a head", "Fit that head")
        kept = []
        for number, path in enumerate(sorted(self._folder.glob("tfdpx-*.release"))):
            header, _, content = path.read_bytes().partition(b"\n")
            try:
                record = files.opened(header, _RELEASE)
                if record["number"] != number:
                    raise ValueError("a release before it is missing")
                if files.digest_of(content) != record["digest of the array"]:
                    raise ValueError("it is not the file that was saved")
            except ValueError as error:
                raise ValueError(f"{path.name}: {error}") from error
            kept.append((record, np.load(io.BytesIO(content), allow_pickle=False)))
        if kept and self._examples.count is None:
            self._examples.count = kept[0][0]["examples"]
        return kept

"""Scores of trained models on disk, in chunks: an interrupted run resumes after the last chunk."""

import hashlib
import time

import numpy as np

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx import noise
from tfdpx.train.config.errors import UserError, checking_flags


class Store:
    """The folder of an audit.

    Args:
        workdir: `pathlib.Path`.
        described: Dict, what all chunks of the folder have in common.
        say: Function that takes a line of progress.

    Raises:
        UserError: If the folder cannot be written, or is of another audit.
    """

    def __init__(self, workdir, described, say):
        self._workdir, self._say = workdir, say
        self._seed = described["seed"]
        holder = f"The folder --workdir={workdir} holds an audit"
        try:
            with checking_flags():
                resumable.begin(workdir / "audit.json", described, holder, "Choose another folder.")
        except OSError as error:
            raise UserError(f"Cannot write to --workdir={workdir}: {error}.") from error

    def scores(self, name, count, size, make):
        """Scores of `count` models, float64; only chunks that are missing are made.

        Args:
            name: String that identifies these models.
            count: Int; rounded up to whole chunks.
            size: Int, models of a chunk.
            make: Function of a seed, as of `tfdpx.noise.make_seed`, to scores [size].
        """
        folder, chunks = self._workdir / name, -(-count // size)
        folder.mkdir(parents=True, exist_ok=True)
        found, began, made = [], time.monotonic(), 0
        for index in range(chunks):
            path = folder / f"{size}-{index:05}.npy"
            if not path.exists():
                scores = np.asarray(make(self._seed_of(name, size, index)), "float64")
                with files.replacing(path) as fresh:
                    np.save(fresh, scores)
                made += 1
                left = (time.monotonic() - began) / made * (chunks - index - 1)
                self._say(f"{name}: {(index + 1) * size} models, about {left:.0f} s left")
            found.append(np.load(path))
        return np.concatenate(found)

    def _seed_of(self, *parts):
        """A seed of the chunk's own."""
        digest = hashlib.sha256(f"{self._seed} {parts}".encode()).digest()
        return noise.make_seed(int.from_bytes(digest[:8], "big"))

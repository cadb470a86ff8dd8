"""Features in a folder: float32 shards, written one by one, so that extraction can resume."""

import hashlib
import pathlib
import secrets

import numpy as np

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.train.errors import UserError, checking_flags

_ABOUT, _KEY = "features.json", "split.key"


class FeatureFolder:
    """Shards `<split>-00000.npz`, `features.json` with what made them, and a folder for each head.

    `features.json` is a `Record`: features of private examples are not private, so its epsilon is
    infinite. Its `seen` says what the backbone had seen. Shards and `split.key` are for the owner
    alone: a shard holds features, labels, and hashes of the examples under that key.

    Args:
        path: Folder.
        record: Optional `Record` of an extraction. A folder made by another is refused.

    Attributes:
        path: `pathlib.Path`.
        record: `Record`.
        extractor: `keras.Model` that this process extracts by; None if it only reads.
        data: `images.ImageData` that it extracts from, or None.

    Raises:
        UserError: If the folder holds other features, or none and `record` is None.
    """

    def __init__(self, path, record=None):
        self.path, self.extractor, self.data = pathlib.Path(path), None, None
        about = self.path / _ABOUT
        if about.exists():
            with checking_flags():
                self.record = records.read(about)
                holder, remedy = f"The folder {path} holds features made", "Choose another folder."
                if record is not None:
                    made = _made_by(self.record), _made_by(record)
                    resumable.check_same(*made, holder, remedy)
        elif record is None:
            raise UserError(f"The folder {path} holds no features: make them with "
                            "--init_from=MODEL.keras and --dataset=NAME.")  # fmt: skip
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            files.write(self.path / _KEY, secrets.token_bytes(32))
            self.record = record
            record.save(about)

    @property
    def num_classes(self):
        """Int."""
        return self.record.settings["num_classes"]

    @property
    def before(self):
        """`Ledger` of the backbone's training on the same data."""
        same = (each.ledger for each in self.record.seen if each.data == self.record.data)
        return sum(same, Ledger())

    def shard(self, split, index):
        """The path of a shard."""
        return self.path / f"{split}-{index:05}.npz"

    def holds(self, split, index, labels, examples):
        """Whether a shard is there, of these examples and no others.

        Args:
            split: As of `write`.
            index: As of `write`.
            labels: As of `write`.
            examples: As of `write`.

        Raises:
            UserError: If it is of other examples or labels: the data have changed since.
        """
        if not self.shard(split, index).exists():
            return False
        with np.load(self.shard(split, index)) as shard:
            same = np.array_equal(shard["labels"], labels)
            same = same and np.array_equal(shard["draws"], self._draws(examples))
        if not same:
            raise UserError(
                f"The folder {self.path} holds features of other {split} images or labels: the "
                "data set has changed since. Choose another folder."
            )
        return True

    def write(self, split, index, features, labels, examples):
        """Writes a shard, whole or not at all.

        Args:
            split: "train" or "test".
            index: Int.
            features: Float array [n, d].
            labels: Int array [n].
            examples: Array [n, ...] that the features are of: each gets a draw in [0, 1) by a hash
                under the folder's key, which follows from this example and no other.
        """
        draws = self._draws(examples)
        with files.replacing(self.shard(split, index)) as fresh:
            np.savez(fresh, features=np.asarray(features, "float32"), labels=labels, draws=draws)

    def _draws(self, examples):
        key = (self.path / _KEY).read_bytes()
        return [_draw(np.ascontiguousarray(example), key) for example in np.asarray(examples)]

    def arrays(self, split):
        """Features `[n, d]`, labels `[n]` and draws `[n]` of all shards of a split."""
        shards = sorted(self.path.glob(f"{split}-*.npz"))
        if not shards:
            raise UserError(f"The folder {self.path} holds no features of the split {split!r}.")
        loaded = [np.load(shard) for shard in shards]
        names = ("features", "labels", "draws")
        return tuple(np.concatenate([shard[name] for shard in loaded]) for name in names)

    def new_head(self):
        """The path of a new folder for a head: none replaces another, since both were paid for."""
        number = 1 + sum(1 for _ in self.path.glob("head-*"))
        while True:
            head = self.path / f"head-{number:03}"
            try:
                head.mkdir()
                return head
            except FileExistsError:
                number += 1


def _made_by(record):
    return {"dataset": record.data.name, "identifier": record.data.identifier, **record.settings}


def _draw(example, key):
    digest = hashlib.blake2b(example, key=key, digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _draw(example, key):
    digest = hashlib.blake2b(example, key=key, digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48

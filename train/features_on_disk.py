"""Features in a folder: float32 shards, written one by one, so that extraction can resume."""

import json
import os
import pathlib

import numpy as np

from tfdpx.train.config.errors import UserError


class FeatureFolder:
    """Shards `<split>-00000.npz` with features and labels, and `features.json` with what made them.

    Args:
        path: Folder.
        made_by: Optional dict of JSON values. A folder made by others is refused.

    Raises:
        UserError: If the folder holds other features, or none and `made_by` is None.
    """

    def __init__(self, path, made_by=None):
        self.path = pathlib.Path(path)
        description = self.path / "features.json"
        if description.exists():
            self._made_by = json.loads(description.read_text())
            if made_by is not None and self._made_by != made_by:
                raise UserError(
                    f"The folder {path} holds features made by {self._made_by}. Received: "
                    f"{made_by}. Choose another folder."
                )
        elif made_by is None:
            raise UserError(f"The folder {path} holds no features: make some with "
                            "tfdpx.train.features.")  # fmt: skip
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            self._made_by = made_by
            description.write_text(json.dumps(made_by))

    @property
    def num_classes(self):
        """Int."""
        return self._made_by["num_classes"]

    def shard(self, split, index):
        """The path of a shard."""
        return self.path / f"{split}-{index:05}.npz"

    def write(self, split, index, features, labels):
        """Writes a shard, whole or not at all."""
        fresh = self.path / f"next-{split}-{index:05}.npz"
        np.savez(fresh, features=np.asarray(features, "float32"), labels=labels)
        os.replace(fresh, self.shard(split, index))

    def arrays(self, split):
        """Features `[n, d]` and labels `[n]` of all shards of a split."""
        shards = sorted(self.path.glob(f"{split}-*.npz"))
        if not shards:
            raise UserError(f"The folder {self.path} holds no features of the split {split!r}.")
        loaded = [np.load(shard) for shard in shards]
        return tuple(np.concatenate([s[name] for s in loaded]) for name in ("features", "labels"))

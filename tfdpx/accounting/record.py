"""Defines the record of a run: its data, privacy loss, earlier trainings, and results.

The record is saved as `record.json` in the folder of the run. The archive `model.keras` contains
the same record in an entry that Keras ignores. If Keras loads the archive and saves it again, the
record is lost.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import io
import json
import math
import os
import pathlib
import platform
import zipfile
import zlib
from typing import Any

import h5py
import numpy as np

from tfdpx import _files as files
from tfdpx.accounting import statement
from tfdpx.accounting.attack import AttackBounds
from tfdpx.accounting.groups import Sampling
from tfdpx.accounting.ledger import EXAMPLE, Ledger

FILE = "record.json"
_ENTRY, _WEIGHTS = "tfdpx_record.json", "model.weights.h5"
_FORMAT = "tfdpx.Record/3"
_PACKAGES = ("tfdpx", "tensorflow", "keras", "numpy", "dp-accounting", "pillow")


@dataclasses.dataclass(frozen=True)
class DatasetId:
    """Identifies a data set without revealing anything about its examples.

    Args:
        name: String, a name for people to read, not a path.
        num_examples: Optional int, the number of examples.
        identifier: Random string that is stored with the data. None if the data are public and
            their name identifies them.
    """

    name: str
    num_examples: int | None = None
    identifier: str | None = None


@dataclasses.dataclass(frozen=True)
class UpstreamTraining:
    """An earlier training that made the weights or features with which a run started.

    Args:
        data: `DatasetId` of the data of the earlier training.
        ledger: `Ledger` of the privacy spent on these data. It has an entry without noise if the
            training was not private.
        delta: Float in (0, 1) from the record of the earlier training, or None.
    """

    data: DatasetId
    ledger: Ledger
    delta: float | None = None

    @property
    def epsilon(self) -> float:
        """Float, the epsilon of the earlier training at `delta`."""
        return self.ledger.composed_epsilon(self.delta)

    @property
    def limit(self) -> float | None:
        """Float, an upper bound on the privacy spent; None if a part of it is unknown.

        The value is `epsilon`, which is infinite if the training was not private.
        """
        is_unknown = self.epsilon < math.inf and statement.is_unknown(self.ledger)
        return None if is_unknown else self.epsilon


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a run: program, settings, privacy spent on the data, and results.

    Args:
        program: String, the program that wrote the record, for example "classify".
        data: `DatasetId` of the training data, or None if unknown.
        ledger: `Ledger` of these data. It includes this run, and all earlier runs on the same data
            that led to the weights of this run.
        delta: Float in (0, 1), the delta for the ledger's updates and releases; or None.
        accountant: As for `Ledger.epsilon`.
        sampling: String, how batches were drawn: "poisson", "shuffle", "full_batch", or "unknown"
            if some batches were not drawn by a plan.
        seen: Tuple of `UpstreamTraining`, the earlier trainings of the weights with which the run
            started.
        initialized: Bool, whether the origin of all initial weights is known: an initializer of
            Keras filled them, or they come from the trainings in `seen`.
        independence: String, or None. It names the method that computes the gradient of each
            example separately.
        searched: String, a description of a search for hyperparameters on the same data, or None.
            Epsilon covers the search if `ledger` has entries of a paid search.
        inputs: Dict that describes the inputs of a saved model, or None.
        unit: String, the word for an example in texts, for example "image".
        settings: Dict of JSON values, the settings of the program without seeds and paths.
        results: Dict of JSON values, for example accuracies.
        date: String, the time of the run in ISO 8601.
        versions: Dict from names of packages to versions, both strings.
        weights: String, a digest of the model's weights. None if no model was saved.
    """

    program: str
    data: DatasetId | None
    ledger: Ledger
    delta: float | None
    accountant: str = "pld"
    sampling: str = "poisson"
    seen: tuple[UpstreamTraining, ...] = ()
    initialized: bool = False
    independence: str | None = None
    searched: str | None = None
    inputs: dict[str, Any] | None = None
    unit: str = "image"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    date: str = dataclasses.field(default_factory=lambda: _now())
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: _versions())
    weights: str | None = None

    @property
    def epsilon(self) -> float:
        """Float, the epsilon of the ledger at `total_delta`.

        All batches count as Poisson samples. `is_approximate` tells whether some were not.
        """
        return self.ledger.composed_epsilon(self.delta, self.accountant)

    @property
    def is_private(self) -> bool:
        """Bool: whether epsilon is finite. A finite epsilon need not be an upper bound.

        `tfdpx.accounting.statement.is_unknown` tells whether it is one.
        """
        return self.epsilon < math.inf

    @property
    def total_delta(self) -> float | None:
        """Float, the delta at which `epsilon` holds; None if no part of the ledger has a delta."""
        return self.ledger.total_delta(self.delta)

    @property
    def neighbours(self) -> str:
        """String, the neighbouring relation: "add_or_remove_one" or "add_or_remove_user"."""
        return "add_or_remove_one" if self.ledger.unit == EXAMPLE else "add_or_remove_user"

    @property
    def is_approximate(self) -> bool:
        """Bool: whether some batches were not drawn by Poisson sampling, as accountants assume."""
        return self.sampling == "shuffle" or self.ledger.is_approximate

    @property
    def is_releasable(self) -> bool:
        """Bool: whether the weights may be published: epsilon is finite and `problems` is empty."""
        return self.is_private and not self.problems

    @property
    def problems(self) -> list[str]:
        """List of reasons not to publish the weights.

        - "origin": the run spent nothing, but the weights with which it started come from a
          training with an infinite or unknown epsilon.
        - "infinite": epsilon is infinite.
        - "unknown": epsilon is not an upper bound, because a part of the privacy spent is unknown.
        - "seed": the user chose a seed. Anyone who knows the seed can subtract the noise.
        - "search": hyperparameters were searched on the same data, and epsilon does not cover this.
        """
        without_account = any(training.limit in (None, math.inf) for training in self.seen)
        # A ledger without its record has no delta, so only its noise is known.
        is_finite = self.ledger.has_noise if self.delta is None else self.is_private
        problems = {
            "origin": without_account and not self.ledger.steps,
            "infinite": not is_finite,
            "unknown": statement.is_unknown(self.ledger),
            "seed": self.ledger.is_seeded,
            "search": not self.is_search_paid,
        }
        return [problem for problem, holds in problems.items() if holds]

    @property
    def is_search_paid(self) -> bool:
        """Bool: False if there was a search for hyperparameters that epsilon does not cover.

        Epsilon covers the search if the ledger has a paid search that does not belong to an earlier
        training in `seen`.
        """
        earlier = {run for training in self.seen for run in training.ledger.selections}
        return self.searched is None or not earlier.issuperset(self.ledger.selections)

    def ledger_as_drawn(self) -> Ledger:
        """Returns the ledger with upper bounds in place of the entries for shuffled batches.

        An epoch of shuffled batches uses each example once, so it costs at most as much as one
        update on the full data. An entry of n steps is replaced by such updates. A run may begin
        within an epoch, so the first step counts as a whole epoch. The other n - 1 steps count as
        epochs, and their number is rounded up. Entries for batches that no plan drew remain
        unchanged.
        """
        entries = tuple(
            _as_shuffled(entry) if entry.shuffled else entry for entry in self.ledger.entries
        )
        return dataclasses.replace(self.ledger, entries=entries)

    def attack_bounds(self) -> AttackBounds | None:
        """Returns the `AttackBounds` of the ledger; None if no bound is known."""
        ledger = self.ledger_as_drawn()
        if statement.is_unknown(ledger):
            return None
        # If there is no delta at all, nothing was private. Then the bounds are 1 at any delta.
        return ledger.attack_bounds(self.delta or self.total_delta or 0.5)

    @property
    def fingerprint(self) -> str:
        """String, a digest of the record and, with the record, of the model's weights."""
        content = plain(dataclasses.asdict(self))
        digits = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
        return " ".join(digits[i : i + 4] for i in range(0, 32, 4))

    def counts(self, training: UpstreamTraining) -> bool:
        """Returns whether `ledger` includes the whole privacy loss of an earlier training.

        Args:
            training: `UpstreamTraining`, one of `self.seen`.
        """
        return bool(training.ledger.steps) and self.ledger + training.ledger == self.ledger

    def view(self) -> dict[str, Any]:
        """Returns a dict of the results and of values computed from the record.

        A program prints it as the last line of its output.
        """
        counted = {name: self.results[name] for name in ("steps",) if name in self.results}
        return {**self.results, **self._derived(), **counted}

    def _derived(self) -> dict[str, Any]:
        bounds = self.attack_bounds()
        return {
            "dataset": self.data and self.data.name,
            "num_examples": self.data and self.data.num_examples,
            "private": self.is_private,
            "epsilon": self.epsilon,
            "delta": self.total_delta if self.is_private else None,
            "attack_bounds": bounds and bounds.to_dict(),
            "accountant": self.accountant,
            "sampling": self.sampling,
            "neighbours": self.neighbours,
            "steps": self.ledger.steps,
            "epsilon_is_approximate": self.is_approximate,
            "independence": self.independence,
            "searched": self.searched,
            "seen": [{"dataset": t.data.name, "epsilon": t.limit} for t in self.seen],
            "seeded": self.ledger.is_seeded,
            "releasable": self.is_releasable,
        }

    def to_json(self) -> bytes:
        """Returns the record as the bytes of a JSON file.

        For readers, the file also has values that are computed from the record. A digest in the
        file detects accidental changes.
        """
        content = {"format": _FORMAT, **plain(dataclasses.asdict(self))}
        return files.sealed(content | {"derived": plain(self._derived())}, indent=1)

    @classmethod
    def from_json(cls, content: bytes) -> Record:
        """Returns the record from the bytes that `to_json` returned.

        Args:
            content: Bytes.

        Raises:
            ValueError: If `content` is not a complete record, or was changed.
        """
        try:
            saved = files.opened(content, _FORMAT)
            del saved["format"], saved["derived"]  # These values are computed from the others.
            saved["seen"] = tuple(
                UpstreamTraining(
                    DatasetId(**training.pop("data")),
                    Ledger.from_dict(training.pop("ledger")),
                    **training,
                )
                for training in saved["seen"]
            )
            saved["data"] = saved["data"] and DatasetId(**saved["data"])
            return cls(ledger=Ledger.from_dict(saved.pop("ledger")), **saved)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"It is no whole record of a run, or was edited: {error}. Its steps count against "
                "the budget, so restore it from a copy."
            ) from error

    def save(self, path: str | os.PathLike) -> Record:
        """Writes the record to a JSON file or into a `.keras` archive, completely or not at all.

        Args:
            path: String or path-like: an existing archive that ends in ".keras", or the JSON file
                to write or replace.

        Returns:
            The record that was written: into an archive, with the digest of the archive's weights.
        """
        path = pathlib.Path(path)
        if path.suffix != ".keras":
            files.write(path, self.to_json(), mode=0o644)
            return self
        content = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w") as new:
            for entry in old.infolist():
                if entry.filename != _ENTRY:
                    new.writestr(entry, old.read(entry))
            record = dataclasses.replace(self, weights=_weights_digest(old))
            new.writestr(_ENTRY, record.to_json())
        files.write(path, content.getvalue(), mode=0o644)
        return record


def read(path: str | os.PathLike) -> Record | None:
    """Returns the `Record` in a JSON file or a `.keras` archive; None for an archive without one.

    Args:
        path: String or path-like, the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, or the archive's weights were replaced after the record
            was added. The message names the path. The check detects accidental changes, but not a
            forgery.
    """
    path = os.fspath(path)
    try:
        if path.endswith(".keras"):
            with zipfile.ZipFile(path) as archive:
                if _ENTRY not in archive.namelist():
                    return None
                record = Record.from_json(archive.read(_ENTRY))
                if record.weights != _weights_digest(archive):
                    raise ValueError(
                        "Its weights are not those that its record speaks of, so their privacy "
                        "cost is unknown: restore it from a copy. (This detects accidents, but no "
                        "forgery.)"
                    )
                return record
        with open(path, "rb") as file:
            return Record.from_json(file.read())
    except (ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"Cannot read {path}. {error}") from error


def plain(value: Any) -> Any:
    """Returns a value in a form that is strictly valid JSON.

    Infinities become the strings "inf" and "-inf", and NaN becomes None.

    Args:
        value: String, bool, None, Python number, NumPy scalar, or lists and dicts of these.
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _as_shuffled(entry):
    noise, probability = entry.noise_multiplier, entry.sampling_probability
    # The first step may be the last one of an epoch, so it counts as an epoch.
    later = Sampling("shuffle").run(noise, probability, entry.steps - 1)[-1]
    return dataclasses.replace(
        entry, sampling_probability=1.0, steps=1 + later, poisson_sampled=True
    )


def _weights_digest(archive):
    """Returns a digest of the model's weights in a `.keras` archive; None if it has no weights.

    Variables of the optimizer are not included.

    Args:
        archive: `zipfile.ZipFile`.
    """
    if _WEIGHTS not in archive.namelist():
        return None
    digest, names = hashlib.sha256(), []
    try:
        with h5py.File(io.BytesIO(archive.read(_WEIGHTS))) as file:
            file.visit(names.append)
            for name in sorted(names):
                if isinstance(file[name], h5py.Dataset) and not name.startswith("optimizer/"):
                    array = np.asarray(file[name])
                    digest.update(repr((name, array.dtype.str, array.shape)).encode())
                    digest.update(array.tobytes())
    except (OSError, KeyError) as error:
        raise ValueError(f"Its weights cannot be read: {error}") from error
    return digest.hexdigest()


def _now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _versions():
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

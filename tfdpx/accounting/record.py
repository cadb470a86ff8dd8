"""The record of a run: the data, the privacy spent on them, earlier trainings, and results.

All readers use this one file. `model.keras` carries the same record inside, as an entry of the
archive that Keras does not read, with a digest of the weights. A file that Keras has saved again
has neither.
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
    """The name of the data set that was trained on, with nothing from the content of its examples.

    Args:
        name: String, for people; no path.
        num_examples: Optional int.
        identifier: Random string that is kept with the data, or None if a public name identifies
            them.
    """

    name: str
    num_examples: int | None = None
    identifier: str | None = None


@dataclasses.dataclass(frozen=True)
class UpstreamTraining:
    """An earlier training behind the weights or features that a run started from.

    Args:
        data: `DatasetId` of its data.
        ledger: `Ledger` of these data; an entry without noise if nothing was private.
        delta: Float in (0, 1) from its own record, or None.
    """

    data: DatasetId
    ledger: Ledger
    delta: float | None = None

    @property
    def epsilon(self) -> float:
        """Float, at `delta`."""
        return self.ledger.composed_epsilon(self.delta)

    @property
    def limit(self) -> float | None:
        """Float, epsilon; None if it is no limit to what was spent."""
        is_unknown = self.epsilon < math.inf and statement.is_unknown(self.ledger)
        return None if is_unknown else self.epsilon


@dataclasses.dataclass(frozen=True)
class Record:
    """The program and settings of a run, the privacy that it spent on its data, and its results.

    Args:
        program: String, the program that wrote it, for example "classify".
        data: `DatasetId` of the training data, or None if unknown.
        ledger: `Ledger` of these data, by this run and by all runs behind its weights.
        delta: Float in (0, 1) for the ledger, or None.
        accountant: As for `Ledger.epsilon`.
        sampling: String, the way of drawing batches: "poisson", "shuffle", "full_batch", or
            "unknown" if no plan drew some of them.
        seen: Tuple of `UpstreamTraining`, for the weights that the run started from.
        initialized: Bool, whether all initial weights were seen being filled by an initializer, or
            else came from the trainings in `seen`.
        independence: String, how examples are kept apart, or None.
        searched: String, how arguments were searched on the same data, or None. Paid for if
            `ledger` has a selection.
        inputs: Dict that describes the inputs of a saved model, or None.
        unit: String, the word for an example, such as "image".
        settings: Dict of JSON values, without seeds and paths.
        results: Dict of JSON values.
        date: String, ISO 8601.
        versions: Dict from packages to strings.
        weights: String, a digest of the model's weights; None outside of a `.keras` file.
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
    weights: str | None = dataclasses.field(default=None, compare=False)

    @property
    def epsilon(self) -> float:
        """Float, at `total_delta`. All batches count as Poisson samples."""
        return self.ledger.composed_epsilon(self.delta, self.accountant)

    @property
    def is_private(self) -> bool:
        """Whether epsilon is finite, though it may be no limit (`statement.is_unknown`)."""
        return self.epsilon < math.inf

    @property
    def total_delta(self) -> float | None:
        """Float, or None if nothing has a delta."""
        return self.ledger.total_delta(self.delta)

    @property
    def neighbours(self) -> str:
        """Description of the data sets that are neighbours."""
        return "add_or_remove_one" if self.ledger.unit == EXAMPLE else "add_or_remove_user"

    @property
    def is_approximate(self) -> bool:
        """Whether batches were drawn in another way than the accountants assume."""
        return self.sampling == "shuffle" or self.ledger.is_approximate

    @property
    def is_releasable(self) -> bool:
        """Whether epsilon is finite and known, without a chosen seed or an unpaid search."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """Reasons not to release the weights: "origin", "infinite", "unknown", "seed", "search"."""
        without_account = any(training.limit in (None, math.inf) for training in self.seen)
        problems = {
            "origin": without_account and not self.ledger.steps,
            "infinite": not self.ledger.has_noise,  # A ledger alone has no delta.
            "unknown": statement.is_unknown(self.ledger),
            "seed": self.ledger.is_seeded,
            "search": not self.is_search_paid,
        }
        return [problem for problem, holds in problems.items() if holds]

    @property
    def is_search_paid(self) -> bool:
        """Whether epsilon covers the search of arguments, by an entry newer than the weights."""
        earlier = {run for training in self.seen for run in training.ledger.selections}
        return self.searched is None or not earlier.issuperset(self.ledger.selections)

    def ledger_as_drawn(self) -> Ledger:
        """Returns the ledger for an accountant of Poisson samples, with shuffled batches in full.

        They get no amplification, because each example is in one batch per epoch. An entry covers
        one `fit`, which may begin and end within an epoch, so it counts as one epoch more than its
        length minus a step. Batches that no plan drew stay as they are: nothing is known of them.
        """
        entries = tuple(
            _as_shuffled(entry) if entry.shuffled else entry for entry in self.ledger.entries
        )
        return dataclasses.replace(self.ledger, entries=entries)

    def attack_bounds(self) -> AttackBounds | None:
        """Returns bounds on attacks on one example, or person; None if no bound is known."""
        ledger = self.ledger_as_drawn()
        if statement.is_unknown(ledger):
            return None
        # Without a delta nothing is private.
        return ledger.attack_bounds(self.delta or self.total_delta or 0.5)

    @property
    def fingerprint(self) -> str:
        """A digest of the whole record, the same in `record.json` and in the model file."""
        content = plain(dataclasses.asdict(dataclasses.replace(self, weights=None)))
        digits = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
        return " ".join(digits[i : i + 4] for i in range(0, 32, 4))

    def counts(self, training: UpstreamTraining) -> bool:
        """Returns whether `ledger` includes all that was spent on the weights in a training.

        Args:
            training: One of `self.seen`.
        """
        return bool(training.ledger.steps) and self.ledger + training.ledger == self.ledger

    def view(self) -> dict[str, Any]:
        """Returns results and the values derived from the record, for a program's last line."""
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
        """Returns the record as a file, with derived values and a digest that detects accidents."""
        content = {"format": _FORMAT, **plain(dataclasses.asdict(self))}
        return files.sealed(content | {"derived": plain(self._derived())}, indent=1)

    @classmethod
    def from_json(cls, content: bytes) -> Record:
        """Returns the record from a file of `to_json`.

        Args:
            content: Bytes.

        Raises:
            ValueError: If it is no whole record, or was edited.
        """
        try:
            saved = files.opened(content, _FORMAT)
            del saved["format"], saved["derived"]  # Derived values are for people.
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

    def save(self, path: str | os.PathLike) -> None:
        """Writes the record, as a whole or not at all, to a JSON file or into a `.keras` archive.

        Args:
            path: Path of an existing file that ends in ".keras", or of the file to write.
        """
        path = pathlib.Path(path)
        if path.suffix != ".keras":
            files.write(path, self.to_json(), mode=0o644)
            return
        content = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w") as new:
            for entry in old.infolist():
                if entry.filename != _ENTRY:
                    new.writestr(entry, old.read(entry))
            record = dataclasses.replace(self, weights=_weights_digest(old))
            new.writestr(_ENTRY, record.to_json())
        files.write(path, content.getvalue(), mode=0o644)


def read(path: str | os.PathLike) -> Record | None:
    """Returns the record in a JSON file or a `.keras` archive; None if an archive has none.

    Args:
        path: Path of the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is damaged, or the archive's weights were replaced after the record was
            added; the message names the file. This detects accidents but no forgery.
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
    """Returns a value for strictly valid JSON: infinities are strings, NaN and None are null.

    Args:
        value: String, boolean, None, Python number, NumPy scalar, or lists and dicts of such.
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
    # The first step may be the last of an epoch.
    later = Sampling("shuffle").run(noise, probability, entry.steps - 1)[-1]
    return dataclasses.replace(
        entry, sampling_probability=1.0, steps=1 + later, poisson_sampled=True
    )


def _weights_digest(archive):
    """Returns a digest of a `.keras` archive's weights without the optimizer's, or None."""
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

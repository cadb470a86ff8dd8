"""What a run leaves: what was spent on which data, what the weights had seen, and what was found.

One file for every reader. `model.keras` carries the same record inside, as an entry of the archive
that Keras does not read; a file that Keras has saved again has it no more.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import io
import math
import os
import pathlib
import platform
import zipfile
import zlib
from typing import Any

import numpy as np

from tfdpx import _files as files
from tfdpx.accounting import statement
from tfdpx.accounting.ledger import EXAMPLE, Ledger, entry_of
from tfdpx.accounting.samplings import Sampling
from tfdpx.accounting.spent import Data, Seen, Selected, Spent

FILE = "record.json"
_ENTRY = "tfdpx_record.json"
_FORMAT = "tfdpx.Record/1"
_PACKAGES = ("tfdpx", "tensorflow", "keras", "numpy", "dp-accounting", "pillow")
_FULL_BATCH = (
    "Gaussian releases of sums over all examples, each of which is clipped, with noise of "
    "noise_multiplier times the clip; all else follows from these."
)
# An epsilon of another version of dp_accounting may differ by so much: DESIGN's errata have 3%.
_SAME_VERSION, _OTHER_VERSION = 2e-3, 0.05


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run was, what it spent on its data, and what it found.

    Args:
        program: String, what wrote it, such as "classify".
        data: `Data` that were trained on, or None where nobody knows.
        spent: `Spent` on these data, by this run and by all behind its weights.
        delta: Float in (0, 1) for the ledger, or None.
        accountant: As of `Ledger.epsilon`.
        sampling: How batches were drawn: "poisson", "shuffle", or "full_batch".
        seen: Tuple of `Seen`: trainings behind the weights that the run started from.
        independence: String, the way in which examples are kept apart, or None.
        searched: String, how arguments were searched on the same data, or None. Paid for if
            `spent` has a selection.
        inputs: Dict of what a saved model takes, or None.
        unit: String, what an example is.
        settings: Dict of JSON values: neither seeds nor paths.
        results: Dict of JSON values.
        date: String, ISO 8601.
        versions: Dict from packages to strings.
    """

    program: str
    data: Data | None
    spent: Spent
    delta: float | None
    accountant: str = "pld"
    sampling: str = "poisson"
    seen: tuple[Seen, ...] = ()
    independence: str | None = None
    searched: str | None = None
    inputs: dict[str, Any] | None = None
    unit: str = "image"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    date: str = dataclasses.field(default_factory=lambda: _now())
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: _versions())

    @property
    def epsilon(self) -> float:
        """Float, at `total_delta`. Shuffled batches count as Poisson samples."""
        return self.spent.epsilon(self.delta, self.accountant)

    @property
    def total_delta(self) -> float | None:
        """Float, or None where nothing has a delta."""
        return self.spent.total_delta(self.delta)

    @property
    def neighbours(self) -> str:
        """Which data sets are neighbours."""
        return "add_or_remove_one" if self.spent.ledger.unit == EXAMPLE else "add_or_remove_user"

    @property
    def is_approximate(self) -> bool:
        """Whether batches were drawn otherwise than the accountants assume."""
        return self.sampling == "shuffle" or self.spent.ledger.is_approximate

    @property
    def is_releasable(self) -> bool:
        """Whether epsilon is finite, known, of no chosen seed and of no search that nobody paid."""
        known = self.spent.is_complete and not self.spent.is_seeded
        known = known and not self.rests_on_unaccounted
        return self.epsilon < math.inf and known and self.is_search_paid

    @property
    def rests_on_unaccounted(self) -> bool:
        """Whether it spent nothing, on weights that saw other data without an account."""
        seen = (each.epsilon == math.inf or not each.spent.is_complete for each in self.seen)
        return not self.spent.steps and any(seen)

    @property
    def is_search_paid(self) -> bool:
        """Whether epsilon covers how arguments were searched, by more than weights came with."""
        brought = {selected for each in self.seen for selected in each.spent.selected}
        return self.searched is None or not brought.issuperset(self.spent.selected)

    @property
    def is_shuffled(self) -> bool:
        """Whether any batches on its data were shuffled: programs draw no others inexactly."""
        return self.data is not None and self.is_approximate

    def spent_as_drawn(self) -> Spent:
        """`spent` for an accountant of Poisson samples: shuffled batches without amplification."""
        if not self.is_shuffled:
            return self.spent
        entries = self.spent.ledger.entries
        entries = tuple(
            entry if entry.poisson_sampled else _as_shuffled(entry) for entry in entries
        )
        drawn = dataclasses.replace(self.spent.ledger, entries=entries)
        return dataclasses.replace(self.spent, ledger=drawn)

    def statement(self) -> str:
        """The guarantee in words that can be cited (`tfdpx.accounting.statement`)."""
        not_covered = []
        if not self.is_search_paid:
            not_covered.append(f"how the arguments were searched: {self.searched}")
        if self.results.get("individual_mean") is not None:
            not_covered.append("the folder individual_PRIVATE")
        ledgers = [self.spent.ledger, *(each.ledger for each in self.spent.selected)]
        return statement.text(
            sum(ledgers, Ledger()),
            self.total_delta or 0.5,  # Without a delta epsilon is infinite, and no text names it.
            accountant=self.accountant,
            num_examples=self.data.num_examples if self.data else None,
            dataset=self.data.name if self.data else "data that no record names",
            unit=self.unit,
            epsilon=self.epsilon,
            also_spent=[each.about for each in self.spent.selected],
            l2_norm_clip=self.results.get("l2_norm_clip"),
            mechanism=_FULL_BATCH if self.sampling == "full_batch" else None,
            initial=self._initial(),
            independence=self.independence
            and f"no example influences another's gradient. Examples are {self.independence}.",
            not_covered=not_covered,
        )

    def counts(self, seen: Seen) -> bool:
        """Whether `spent` has what was spent behind the weights.

        Args:
            seen: One of `self.seen`.
        """
        return bool(seen.spent.steps) and self.spent + seen.spent == self.spent

    def _initial(self):
        """Sentences on what the weights had seen, and on how the run was chosen."""
        sentences = []
        for each in self.seen:
            where = (
                "on these too, which epsilon covers"
                if self.counts(each)
                else "on other data, as far as names and identifiers tell"
            )
            epsilon = statement.rounded_up(each.epsilon) if each.epsilon < math.inf else "infinite"
            sentences.append(
                f"The initial weights or features were trained on {each.data.name} (epsilon "
                f"{epsilon}), {where}."
            )
        if not sentences:
            sentences.append("The initial weights and fixed features know no data.")
        if self.searched and self.is_search_paid:
            sentences.append(f"It was chosen among {self.searched}: epsilon covers the choice.")
        return " ".join(sentences)

    def view(self) -> dict[str, Any]:
        """What was found and what follows from the record, for the last line of a program."""
        own = {name: self.results[name] for name in ("steps",) if name in self.results}
        return {**self.results, **self._derived(), **own}

    def _derived(self) -> dict[str, Any]:
        epsilon = self.epsilon
        return {
            "dataset": self.data and self.data.name,
            "num_examples": self.data and self.data.num_examples,
            "private": epsilon < math.inf,
            "epsilon": epsilon,
            "delta": self.total_delta if epsilon < math.inf else None,
            "accountant": self.accountant,
            "sampling": self.sampling,
            "neighbours": self.neighbours,
            "steps": self.spent.steps,
            "epsilon_is_approximate": self.is_approximate,
            "independence": self.independence,
            "searched": self.searched,
            "seen": [f"{each.data.name} at epsilon {each.epsilon:.4g}" for each in self.seen],
            "seeded": self.spent.is_seeded,
            "releasable": self.is_releasable,
        }

    def to_json(self) -> bytes:
        """The record as a file: with what follows from it, and a digest that finds accidents."""
        content = {"format": _FORMAT, **plain(dataclasses.asdict(self))}
        return files.sealed(content | {"derived": plain(self._derived())}, indent=1)

    @classmethod
    def from_json(cls, content: bytes) -> Record:
        """The record of `to_json`.

        Args:
            content: Bytes.

        Raises:
            ValueError: If it is no whole record, or does not agree with itself.
        """
        try:
            found = files.opened(content, _FORMAT)
            derived = found.pop("derived")
            del found["format"]
            record = cls(
                **found
                | {
                    "data": found["data"] and Data(**found["data"]),
                    "spent": _spent(found["spent"]),
                    "seen": tuple(
                        Seen(Data(**each["data"]), _spent(each["spent"]), each["delta"])
                        for each in found["seen"]
                    ),
                }
            )
            record._check(derived)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"It is no whole record of a run, or was edited: {error}. What it recorded counts "
                "against the budget: restore it from a copy."
            ) from error
        return record

    def _check(self, derived):
        same = self.versions.get("dp-accounting") == _version("dp-accounting")
        now = plain(self._derived())
        if derived.keys() != now.keys():
            raise ValueError(f"what follows from it is not {', '.join(now)}")
        for name, value in derived.items():
            fits = value == now.get(name)
            if name == "epsilon":
                saved, found = float(value), float(now[name])
                tolerance = _SAME_VERSION if same else _OTHER_VERSION
                fits = saved == found or math.isclose(saved, found, rel_tol=tolerance)
            if not fits:
                raise ValueError(f"it says {name}={value}, and its ledger {now.get(name)}")
        if self.spent.ledger.entries and self.results.get("steps", 0) > self.spent.steps:
            raise ValueError(
                f"it says steps={self.results['steps']}, and its ledger {self.spent.steps}"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Writes the record, whole or not at all: to a JSON file, or into a `.keras` archive.

        Args:
            path: Path of a file that ends in ".keras" and is there, or of the file to write.
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
            new.writestr(_ENTRY, self.to_json())
        files.write(path, content.getvalue(), mode=0o644)


def read(path: str | os.PathLike) -> Record | None:
    """The record in a JSON file or a `.keras` archive; None if an archive has none.

    Args:
        path: Path of the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is damaged, naming the file.
    """
    path = os.fspath(path)
    try:
        if path.endswith(".keras"):
            with zipfile.ZipFile(path) as archive:
                if _ENTRY not in archive.namelist():
                    return None
                return Record.from_json(archive.read(_ENTRY))
        with open(path, "rb") as file:
            return Record.from_json(file.read())
    except (ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"Cannot read {path}. {error}") from error


def plain(value: Any) -> Any:
    """A value as strictly valid JSON knows it: infinities are strings, NaN and None are null.

    Args:
        value: String, boolean, None, Python number, NumPy scalar, or lists and dicts of these.
    """
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _as_shuffled(entry):
    names = ("noise_multiplier", "sampling_probability", "steps")
    run = Sampling("shuffle").run(*(getattr(entry, name) for name in names))
    return dataclasses.replace(entry, **dict(zip(names, run, strict=True)))


def _spent(saved):
    selected = (
        Selected(**{**each, "ledger": _ledger(each["ledger"])}) for each in saved["selected"]
    )
    return Spent(_ledger(saved["ledger"]), tuple(selected))


def _ledger(saved):
    return Ledger(**{**saved, "entries": tuple(entry_of(entry) for entry in saved["entries"])})


def _now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _versions():
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

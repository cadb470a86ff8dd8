"""The ledger lists everything that has spent privacy on a data set, and computes epsilon."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpx import _files as files
from tfdpx._arguments import check_choice, check_positive_integer, is_integer, is_number, require
from tfdpx._warnings import warn
from tfdpx.accounting import accountants, attack, selection, statement

if TYPE_CHECKING:
    from tfdpx.accounting.plan import PrivacyPlan

_FORMAT = "tfdpx.Ledger/8"

EXAMPLE, USER = "example", "user"
UNITS = (EXAMPLE, USER)
_KINDS = UPDATE, RELEASE, SELECTION, MECHANISM = "update", "release", "selection", "mechanism"


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a ledger: a number of equal updates of DP-SGD, or of equal releases.

    The argument `kind` decides what the entry stands for:

    - "update": model updates of DP-SGD.
    - "release": noisy sums over all examples, for example noisy statistics.
    - "selection": updates or releases in each run of a search for hyperparameters. The search
      publishes only its best run, and the ledger counts its cost ("paid search", see
      `Ledger.selected`). All entries of a search have the same `run`.
    - "mechanism": a release of which only epsilon and delta are known (`Ledger.with_release`).

    Args:
        noise_multiplier: Float >= 0; None for a mechanism.
        sampling_probability: Float in (0, 1], the probability that a step draws an example; None if
            unknown.
        steps: Int >= 1, the number of updates or releases.
        poisson_sampled: Bool. Whether each example was drawn independently with
            `sampling_probability`, as the accountants assume.
        run: Optional int, the number of the training run. Two entries with the same run, noise and
            sampling are an earlier and a later state of one training, so a sum of ledgers keeps
            only the one with more steps.
        seeded: Bool. Whether the user chose the seed of the batches or the noise. Epsilon then
            holds only while the seed is secret, so weights of a seeded run are for experiments.
        unit: "example", or "user" if each update draws people and clips the mean gradient of each
            person's examples. Neighbouring data sets then differ in all examples of one person.
        kind: "update", "release", "selection" or "mechanism".
        mean_runs: Float > 1, the mean number of runs of a paid search. Only for a selection.
        delta: Float, the delta that belongs to the epsilon of a selection or a mechanism. It is in
            (0, 1) for a selection, in [0, 1) for a mechanism, and None for other kinds.
        shuffled: Bool. Whether a plan cut the batches from permutations of the data. If batches are
            neither shuffled nor Poisson samples, epsilon is not an upper bound.
        epsilon: Float >= 0. Only for a mechanism.
        name: String, the released statistic. Only for a mechanism.

    Raises:
        ValueError: If an argument is out of range.
    """

    noise_multiplier: float | None
    sampling_probability: float | None
    steps: int
    poisson_sampled: bool = True
    run: int | None = None
    seeded: bool = False
    unit: str = EXAMPLE
    kind: str = UPDATE
    mean_runs: float | None = None
    delta: float | None = None
    shuffled: bool = False
    epsilon: float | None = None
    name: str | None = None

    def __post_init__(self):
        check_choice("unit", self.unit, UNITS)
        check_choice("kind", self.kind, _KINDS)
        is_search = self.kind == SELECTION
        if is_search or self.mean_runs is not None:
            selection.check_mean(self.mean_runs)
        if self.kind == MECHANISM:
            self._check_mechanism()
        elif is_search or self.delta is not None:
            accountants.check_delta(self.delta)
        if is_search or self.run is not None:
            require(is_integer(self.run, is_search), "run", self.run, "be an integer, not negative")
        for name in ("poisson_sampled", "shuffled", "seeded"):
            value = getattr(self, name)
            require(isinstance(value, bool | np.bool_), name, value, "be True or False")
        probability = 1.0 if self.sampling_probability is None else self.sampling_probability
        noise_multiplier = 1.0 if self.kind == MECHANISM else self.noise_multiplier
        accountants.check_run(noise_multiplier, probability, self.steps)
        check_positive_integer("steps", self.steps)
        for name, kind in _PLAIN.items():  # Converts NumPy's numbers, which JSON cannot hold.
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, kind(value))

    def _check_mechanism(self):
        must = "be None for a mechanism, which has epsilon and delta"
        require(self.noise_multiplier is None, "noise_multiplier", self.noise_multiplier, must)
        is_valid = is_number(self.epsilon) and 0 <= self.epsilon < math.inf
        require(is_valid, "epsilon", self.epsilon, "be a finite number >= 0")
        is_valid = is_number(self.delta) and 0 <= self.delta < 1
        require(is_valid, "delta", self.delta, "lie in [0, 1); it is 0 for pure privacy")
        is_valid = isinstance(self.name, str) and bool(self.name.strip())
        require(is_valid, "name", self.name, "be a text that tells what was released")
        if self.run is None:  # With a random number, two equal releases count as two.
            object.__setattr__(self, "run", secrets.randbits(52) | 1)

    @property
    def key(self) -> tuple:
        """Tuple of all values except `steps` and `kind`. Entries with equal keys may be merged."""
        sampling = self.sampling_probability, self.poisson_sampled, self.shuffled
        of_run = self.run, self.noise_multiplier, self.unit, self.seeded
        return *of_run, *sampling, self.mean_runs, self.delta, self.epsilon, self.name

    @property
    def is_gaussian(self) -> bool:
        """Bool: whether the entry is Gaussian, that is, of kind "update" or "release"."""
        return self.kind in (UPDATE, RELEASE)

    @property
    def is_release(self) -> bool:
        """Bool: whether the entry is a noisy statistic of all examples, not an update of DP-SGD."""
        return self.kind != UPDATE and self.sampling_probability == 1


_PLAIN = dict(noise_multiplier=float, sampling_probability=float, steps=int, run=int)
_PLAIN |= dict(epsilon=float, delta=float)
_PLAIN |= dict(poisson_sampled=bool, shuffled=bool, seeded=bool)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """An immutable list of everything that has spent privacy on one data set.

    The entries are updates, releases, paid searches (searches for hyperparameters with a counted
    cost) and other mechanisms. Epsilon is computed as if all updates had drawn their batches by
    Poisson sampling. If some did not, `is_approximate` is True. If a plan shuffled the data,
    epsilon is then an approximation. If no plan drew the batches, epsilon is not an upper bound.

    Args:
        entries: Tuple of `Entry`, in order of time.
        is_complete: Bool. False if weights came from a source without a ledger, for example a file,
            arrays, or training with an ordinary optimizer. The entries are then only a part of the
            privacy spent, and `epsilon` is a lower bound.
        delta: Optional float in (0, 1), the delta that `statement` and `attack_bounds` use by
            default.
        num_examples: Optional int, the number of private examples that `statement` uses by default.

    Example:
    >>> first = Ledger((Entry(noise_multiplier=4.0, sampling_probability=0.1, steps=100),))
    >>> both = first + Ledger((Entry(noise_multiplier=3.0, sampling_probability=0.1, steps=50),))
    >>> both.steps, both.epsilon(delta=1e-5) > first.epsilon(delta=1e-5)
    (150, True)
    """

    entries: tuple[Entry, ...] = ()
    is_complete: bool = True
    delta: float | None = dataclasses.field(default=None, compare=False)
    num_examples: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "entries", tuple(self.entries))
        wrong = [entry for entry in self.entries if not isinstance(entry, Entry)]
        if wrong:
            raise TypeError(
                f"Argument `entries` must hold ledger entries only. Received: {wrong[0]!r}. Create "
                "entries with Entry(noise_multiplier, sampling_probability, steps)."
            )
        if self.delta is not None:
            accountants.check_delta(self.delta)
        if self.num_examples is not None:
            check_positive_integer("num_examples", self.num_examples)
        if not isinstance(self.is_complete, bool):
            raise TypeError(
                "Argument `is_complete` must be True or False. Received: "
                f"is_complete={self.is_complete!r}."
            )

    def assuming(self, sampling_probability: float) -> Ledger:
        """Returns the ledger with all unknown sampling probabilities replaced.

        Args:
            sampling_probability: Float in (0, 1], the probability to assume.
        """
        entries: dict[tuple, Entry] = {}
        for entry in self.entries:
            if entry.sampling_probability is None:
                entry = dataclasses.replace(entry, sampling_probability=sampling_probability)
            # The run may have another entry with this probability. Then the numbers of steps are
            # added.
            steps = entry.steps + (entries[entry.key].steps if entry.key in entries else 0)
            entries[entry.key] = dataclasses.replace(entry, steps=steps)
        return dataclasses.replace(self, entries=tuple(entries.values()))

    def __add__(self, other: Ledger) -> Ledger:
        """Returns the ledger of all entries of both ledgers, which must be about the same data.

        If both ledgers have the same steps of a run, these steps count only once. The sum is
        complete if both ledgers are complete. If only one ledger has a `delta`, or both have the
        same one, the sum has this delta; otherwise its delta is None. The same applies to
        `num_examples`.
        """
        if not isinstance(other, Ledger):
            return NotImplemented
        entries = list(self.entries)
        places = {entry.key: i for i, entry in enumerate(entries) if entry.run is not None}
        for entry in other.entries:
            place = places.get(entry.key)
            if place is None:
                entries.append(entry)
            elif entries[place].steps < entry.steps:
                entries[place] = entry
        pairs = (self.delta, other.delta), (self.num_examples, other.num_examples)
        agreed = ({*pair} - {None} for pair in pairs)
        defaults = (values.pop() if len(values) == 1 else None for values in agreed)
        return Ledger(tuple(entries), self.is_complete and other.is_complete, *defaults)

    @classmethod
    def selected(cls, entries: Sequence[Entry], mean_runs: float, delta: float) -> Ledger:
        """Returns the ledger of a search for hyperparameters that publishes only its best run.

        Args:
            entries: Sequence of `Entry`: all updates and releases of one run, including its noisy
                score.
            mean_runs: Float > 1, the mean number of runs, as passed to `selection.draw_runs`.
            delta: Float in (0, 1), the delta of the search. The cost of the search is this delta
                and the epsilon at this delta; both are added to the cost of other entries.
        """
        search: dict[str, Any] = {"kind": SELECTION, "mean_runs": mean_runs, "delta": delta}
        search["run"] = secrets.randbits(52) | 1
        return cls(tuple(dataclasses.replace(entry, **search) for entry in entries))

    def with_release(
        self, *, epsilon: float, delta: float, unit: str, neighbours: str, name: str
    ) -> Ledger:
        """Returns the ledger with one more release, made by another mechanism or another library.

        The release adds its epsilon and delta to the ledger's epsilon and `total_delta`. In
        `attack_bounds` it counts as the worst mechanism with this guarantee. Two equal releases
        count twice. `load` and `tfdpx account --workdir=releases.jsonl` can read such releases from
        a file: each line is a JSON object with these arguments.

        Args:
            epsilon: Float >= 0, the epsilon of the release.
            delta: Float in [0, 1), the delta of the release; 0 for pure differential privacy.
            unit: "example" or "user", the unit by which neighbouring data sets differ.
            neighbours: "add_or_remove". A guarantee for replacing a unit is refused, because it
                does not compose with the other entries.
            name: String, the released statistic, for example "OpenDP counts by age".

        Raises:
            ValueError: If an argument is invalid.

        Example:
        >>> about = dict(unit="example", neighbours="add_or_remove", name="OpenDP counts by age")
        >>> EMPTY.with_release(epsilon=0.5, delta=0.0, **about).epsilon(delta=1e-5)
        0.5
        """
        hint = (
            ' Replacing one is a removal and an addition: look for the guarantee of "add_or_remove"'
            " in the documentation of the mechanism."
        )
        is_valid = neighbours == "add_or_remove"
        require(is_valid, "neighbours", neighbours, 'be "add_or_remove"', hint)
        pair: dict[str, Any] = {"kind": MECHANISM, "epsilon": epsilon, "delta": delta}
        return self + Ledger((Entry(None, 1.0, 1, unit=unit, name=name, **pair),))

    def with_laplace(
        self, *, scale: float, l1_sensitivity: float, unit: str, neighbours: str, name: str
    ) -> Ledger:
        """Returns the ledger with one more release: numbers with Laplace noise.

        The epsilon of the release is `l1_sensitivity / scale`, and its delta is 0.

        Args:
            scale: Float > 0, the scale of the Laplace noise on each released number.
            l1_sensitivity: Float > 0, the largest sum of absolute changes of the released numbers
                if one unit is added or removed.
            unit: As for `with_release`.
            neighbours: As for `with_release`.
            name: As for `with_release`.

        Raises:
            ValueError: If an argument is invalid.
        """
        for argument, value in (("scale", scale), ("l1_sensitivity", l1_sensitivity)):
            is_valid = is_number(value) and 0 < value < math.inf
            require(is_valid, argument, value, "be a positive, finite number")
        about = {"unit": unit, "neighbours": neighbours, "name": name}
        return self.with_release(epsilon=l1_sensitivity / scale, delta=0.0, **about)

    @property
    def selections(self) -> tuple[tuple[Entry, ...], ...]:
        """Tuple of tuples of `Entry`: for each paid search, the entries of one of its runs."""
        searches: dict[tuple, list[Entry]] = {}
        for entry in self.entries:
            if entry.kind == SELECTION:
                key = entry.run, entry.mean_runs, entry.delta
                searches.setdefault(key, []).append(entry)
        return tuple(map(tuple, searches.values()))

    @property
    def is_approximate(self) -> bool:
        """Bool: whether some updates did not draw their batches by Poisson sampling."""
        return any(not entry.poisson_sampled for entry in self.entries)

    @property
    def unit(self) -> str | None:
        """The unit that epsilon protects: "example", "user", or None if entries differ.

        Entries of different units do not compose. A person may have any number of examples, and one
        example of a person can change an update for users by up to two clips.
        """
        units = {entry.unit for entry in self.entries} or {EXAMPLE}
        return units.pop() if len(units) == 1 else None

    @property
    def has_noise(self) -> bool:
        """Bool: whether all entries have noise and the same unit. If not, epsilon is infinite."""
        return self.unit is not None and all(e.noise_multiplier != 0 for e in self.entries)

    @property
    def is_seeded(self) -> bool:
        """Bool: whether the user chose the seed of any entry. Do not publish such weights."""
        return any(entry.seeded for entry in self.entries)

    def of(self, plan: PrivacyPlan) -> Ledger:
        """Returns a `Ledger` of the updates and releases that match a plan.

        An entry matches if it has the noise multiplier, sampling probability and unit of the plan.

        Args:
            plan: A `PrivacyPlan`.
        """

        def is_of_plan(entry: Entry) -> bool:
            probability = entry.sampling_probability
            if entry.unit != plan.unit or not entry.is_gaussian:
                return False
            if probability is None or not math.isclose(probability, plan.sampling_probability):
                return False
            return math.isclose(entry.noise_multiplier, plan.noise_multiplier, rel_tol=1e-6)

        return dataclasses.replace(self, entries=tuple(filter(is_of_plan, self.entries)))

    @property
    def steps(self) -> int:
        """Int, the number of all updates and releases. Only one run of a paid search counts."""
        return sum(entry.steps for entry in self.entries)

    @property
    def runs(self) -> tuple[accountants.Run, ...]:
        """Tuple of tuples `(noise_multiplier, sampling_probability, steps)`, for the accountants.

        Paid searches and mechanisms do not compose as Gaussian mechanisms. Their noise multiplier
        is therefore 0 here, for which accountants return an infinite epsilon. If entries have
        different units, all noise multipliers are 0.

        Raises:
            ValueError: If a sampling probability is unknown.
        """
        # Equal entries are merged. Otherwise a run with many resumes would take long to compose.
        alike: dict[tuple, int] = {}
        for entry in self.entries:
            if entry.sampling_probability is None:
                raise ValueError(
                    f"The ledger has {entry.steps} steps whose sampling probability is unknown. "
                    "Pass the plan to the optimizer, or declare the probability: "
                    "`ledger.assuming(batch_size / num_examples)`."
                )
            is_composable = self.unit and entry.is_gaussian
            key = (entry.noise_multiplier if is_composable else 0.0, entry.sampling_probability)
            alike[key] = alike.get(key, 0) + entry.steps
        return tuple((*key, steps) for key, steps in sorted(alike.items()))

    def epsilon(self, delta: float | None, accountant: str = "pld") -> float:
        """Returns the epsilon of all entries, for adding or removing one example (or user).

        The epsilon of updates and releases is computed at `delta`. Each paid search and each
        mechanism adds its epsilon and its delta, so the result holds at `total_delta(delta)`.

        Do not use a smaller delta than the plan's. A step that draws more examples than the plan's
        `capacity` raises an error, and only the plan's delta covers the probability of this error.

        Args:
            delta: Float in (0, 1), for updates and releases. It may be None if the ledger has no
                updates and no releases, or if an entry has no noise.
            accountant: "pld" or "rdp"; for full batches also "gdp" or "zcdp". Paid searches always
                use "rdp".

        Returns:
            Float. It is 0.0 for an empty ledger, and infinite if an entry has no noise or entries
            have different units. If the ledger is not complete, it is only a lower bound.

        Raises:
            ValueError: If an argument is out of range, or a sampling probability is unknown.

        Warns:
            UserWarning: If `is_approximate` is True. The text tells whether epsilon is an
                approximation, or not an upper bound at all.
        """
        if self.is_approximate:
            steps = sum(entry.steps for entry in self.entries if not entry.poisson_sampled)
            kind = "no limit" if statement.is_unknown(self) else "an approximation"
            warn(
                f"This epsilon is {kind}: the batches of {steps} of {self.steps} updates were not "
                "drawn by a plan with Poisson sampling, as the accountant assumes. Train with "
                "`fit(x, y)` and an optimizer that has `plan=` for an exact one."
            )
        return self.composed_epsilon(delta, accountant)

    def composed_epsilon(self, delta: float | None, accountant: str = "pld") -> float:
        """Returns `epsilon` without the warning about approximations.

        Args:
            delta: As for `epsilon`.
            accountant: As for `epsilon`.
        """
        if not self.has_noise:
            return math.inf
        runs, pairs = self.parts()
        spent = math.fsum(epsilon for epsilon, _ in pairs)
        if delta is None and not runs:
            return spent
        return accountants.composed_epsilon(runs, delta, accountant) + spent

    def attack_bounds(self, delta: float | None = None) -> attack.AttackBounds:
        """Returns bounds on attacks that find out whether an example, or person, was in the data.

        Args:
            delta: Float in (0, 1), which must not be smaller than the plan's, as for `epsilon`.
                Defaults to the ledger's. A part of it is reserved (`accountants.kept_back`).

        Returns:
            `AttackBounds` for one example, or one user. A paid search or mechanism counts as the
            worst mechanism with its epsilon and delta.

        Raises:
            ValueError: If no bound is known: the ledger is not complete, a batch was not drawn by
                Poisson sampling, or `delta` or a sampling probability is missing.
        """
        delta = self.delta if delta is None else delta
        accountants.check_delta(delta)
        if statement.is_unknown(self):
            why = statement.words().say("why_unknown", self)
            raise ValueError(
                "No bound on attacks is known, because part of what was spent on the weights is "
                f"unknown: {why}. Train again from weights with a ledger, with `fit(x, y)` "
                "and an optimizer that has `plan=`."
            )
        if self.is_approximate:
            raise ValueError(
                "No bound on attacks is known, because some batches were not Poisson sampled. "
                "Train with `fit(x, y)`, which draws by the plan."
            )
        runs, pairs = self.parts() if self.has_noise else (((0.0, 1.0, 1),), ())
        return attack.attack_bounds(runs, delta, self.unit or EXAMPLE, pairs)

    def parts(self) -> tuple[tuple[accountants.Run, ...], tuple[tuple[float, float], ...]]:
        """Returns the cost of all entries in the two forms that accountants need.

        Returns:
            A pair. First, the `runs` of all updates and releases. Second, a tuple of pairs
            (epsilon, delta), one for each paid search and each mechanism.
        """
        pairs = [
            (selection.selection_epsilon(run, run[0].delta, run[0].mean_runs), run[0].delta)
            for run in self.selections
        ]
        pairs += [(e.steps * e.epsilon, e.steps * e.delta) for e in self._mechanisms]
        entries = tuple(entry for entry in self.entries if entry.is_gaussian)
        return dataclasses.replace(self, entries=entries).runs, tuple(pairs)

    @property
    def _mechanisms(self):
        return [entry for entry in self.entries if entry.kind == MECHANISM]

    def total_delta(self, delta: float | None) -> float | None:
        """Returns the delta at which `epsilon(delta)` holds.

        This is `delta`, for updates and releases, plus the deltas of paid searches and mechanisms.

        Args:
            delta: As for `epsilon`.

        Returns:
            Float, or None if `delta` is None and there is no search or mechanism.
        """
        deltas = [run[0].delta for run in self.selections]
        deltas += [entry.steps * entry.delta for entry in self._mechanisms]
        if delta is not None and not (deltas and not any(e.is_gaussian for e in self.entries)):
            deltas.append(delta)
        return sum(deltas) if deltas else None

    def statement(
        self,
        delta: float | None = None,
        *,
        num_examples: int | None = None,
        accountant: str = "pld",
        dataset: str = "the training data",
        rows_per_user: int | None = None,
    ) -> str:
        """Returns a text that states the privacy guarantee, for example for a paper.

        The text tells what is protected, how epsilon was computed, and what is assumed. It is made
        only from the ledger. Only the owner of the data can confirm it.

        Args:
            delta: Float in (0, 1). Defaults to the ledger's. The ledger of an optimizer with a plan
                has the plan's delta.
            num_examples: Optional int, the number of private examples, which the text publishes.
                Defaults to the ledger's.
            accountant: "pld" or "rdp"; for full batches also "gdp" or "zcdp".
            dataset: String, the name of the data.
            rows_per_user: Optional int, the largest number of examples of one person. The text then
                has the epsilon for all of them together, too (`tfdpx.accounting.group_epsilon`).

        Returns:
            String with lines of at most 88 characters. Epsilon is rounded up. If there is no
            differential privacy, if nothing was spent, or if the ledger is incomplete, the text
            says so.

        Raises:
            ValueError: If an argument is out of range, or a sampling probability is unknown.
        """
        delta = self.delta if delta is None else delta
        accountants.check_delta(delta)
        num_examples = self.num_examples if num_examples is None else num_examples
        if num_examples is not None:
            check_positive_integer("num_examples", num_examples)
        about = (dataset, num_examples, delta, accountant)
        return statement.words().of_ledger(self, *about, rows_per_user=rows_per_user)

    def to_json(self) -> str:
        """Returns the ledger as a string of JSON."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Returns the ledger that a string describes.

        Args:
            text: String from `to_json`. Alternatively, a string with one line for each release by
                another mechanism; a line is a JSON object with the arguments of `with_release`.

        Raises:
            ValueError: If `text` is not a complete ledger of this version.
        """
        if text and not text.startswith("{"):
            raise ValueError(
                f"Argument `text` is no ledger, because it is no JSON. Received: {text[:80]!r}. "
                "Pass a file of `Ledger.save`, or the record.json or .keras file of a run: pages "
                "and other texts are for people."
            )
        try:
            if text and '"format"' not in text:
                lines = [line for line in text.splitlines() if line.strip()]
                read = (json.loads(line, object_pairs_hook=files.without_twins) for line in lines)
                return sum((EMPTY.with_release(**arguments) for arguments in read), EMPTY)
            content = json.loads(text, object_pairs_hook=files.without_twins)
            if (file_format := content.pop("format")) != _FORMAT:
                raise ValueError(
                    f"its format is {file_format!r}, not {_FORMAT!r}, so only the version of tfdpx "
                    "that wrote it can read it"
                )
            return cls.from_dict(content | {"is_complete": content["is_complete"]})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"Argument `text` is not a whole ledger: {error}. Received: {text[:80]!r}. The "
                "recorded steps count against the budget, so restore it from a copy."
            ) from error

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Ledger:
        """Returns the ledger from a dict of its arguments, as `to_json` writes them.

        Args:
            saved: Dict. The value of "entries" is a list of dicts, the arguments of each `Entry`.

        Raises:
            ValueError: If an entry is invalid or of another version.
        """
        listed = saved["entries"]
        require(isinstance(listed, list), "entries", listed, "be a list")
        names = {field.name for field in dataclasses.fields(Entry)}
        for entry in listed:
            if entry.keys() - names or entry.get("kind", UPDATE) not in _KINDS:
                raise ValueError(
                    f"this version of tfdpx does not know its entry {entry}. Read it with the "
                    "version that wrote it, or a later one"
                )
        return cls(**saved | {"entries": tuple(Entry(**entry) for entry in listed)})

    def save(self, path: str | os.PathLike) -> None:
        """Writes the ledger to a JSON file. The file is written completely or not at all.

        Args:
            path: String or path-like, the file to write or replace.

        Raises:
            OSError: If the file cannot be written.
        """
        files.write(pathlib.Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Ledger:
        """Returns the ledger in a file, which `save` wrote or which lists releases.

        Args:
            path: String or path-like. `from_json` describes the content of the file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is damaged. The message names the path.
        """
        try:
            return cls.from_json(pathlib.Path(path).read_bytes().decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"Cannot read ledger file {os.fspath(path)!r}. {error}") from error


EMPTY = Ledger()

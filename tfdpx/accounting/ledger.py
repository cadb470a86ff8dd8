"""The record of the noisy steps that were really taken, and their epsilon."""

import dataclasses
import json
import os
import tempfile

import keras

from tfdpx.accounting import accountants

_FORMAT = "tfdpx.Ledger/1"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A number of alike steps of DP-SGD.

    Args:
        noise_multiplier: Float >= 0.
        sampling_probability: Float in (0, 1].
        steps: Int >= 1.

    Raises:
        ValueError: If an argument is out of its range.
    """

    noise_multiplier: float
    sampling_probability: float
    steps: int

    def __post_init__(self):
        accountants.check_run(*dataclasses.astuple(self))
        if self.steps == 0:
            raise ValueError("Argument `steps` of an entry must be at least 1. Received: steps=0.")
        for field in dataclasses.fields(self):  # NumPy's numbers do not go into JSON.
            object.__setattr__(self, field.name, field.type(getattr(self, field.name)))


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The runs of DP-SGD that a data set has seen. Immutable.

    It says what happened; what that costs is the accountant's to say. Steps are taken to have
    drawn their examples by Poisson sampling.

    Args:
        entries: Tuple of `Entry`, in order of time.

    Example:
    >>> spent = Ledger.load(path) + Ledger.from_optimizer(model.optimizer, num_examples=50_000)
    >>> spent.epsilon(delta=1e-5)
    """

    entries: tuple[Entry, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "entries", tuple(self.entries))
        wrong = [entry for entry in self.entries if not isinstance(entry, Entry)]
        if wrong:
            raise TypeError(
                f"Argument `entries` must hold ledger entries only. Received: {wrong[0]!r}. Build "
                "one as Entry(noise_multiplier, sampling_probability, steps)."
            )

    @classmethod
    def from_optimizer(cls, optimizer, num_examples):
        """The ledger of the updates that a DP optimizer has made.

        Args:
            optimizer: A tfdpx optimizer; its `iterations`, `noise_multiplier` and `batch_size`
                are read.
            num_examples: Int. Number of examples of its data set.

        Returns:
            A `Ledger` of one entry, or of none before the first update.

        Raises:
            ValueError: If `num_examples` is less than the optimizer's batch size.
        """
        steps = int(keras.ops.convert_to_numpy(optimizer.iterations))
        if num_examples < optimizer.batch_size:
            raise ValueError(
                "Argument `num_examples` must be at least the optimizer's batch_size. Received: "
                f"num_examples={num_examples}, batch_size={optimizer.batch_size}."
            )
        probability = optimizer.batch_size / num_examples
        return cls((Entry(optimizer.noise_multiplier, probability, steps),) if steps else ())

    def __add__(self, other):
        """The ledger of both runs, on the same data: their losses compose."""
        if not isinstance(other, Ledger):
            return NotImplemented
        return Ledger(self.entries + other.entries)

    @property
    def steps(self):
        """Number of updates, over all entries."""
        return sum(entry.steps for entry in self.entries)

    def epsilon(self, delta, accountant="pld"):
        """The epsilon of all entries together, under adding or removing one example.

        Args:
            delta: Float in (0, 1).
            accountant: "pld" or "rdp".

        Returns:
            Float; 0.0 for an empty ledger, infinity if any step had no noise.

        Raises:
            ValueError: If an argument is out of its range.
        """
        alike = {}  # Joined, so that a run resumed many times is composed at once.
        for entry in self.entries:
            key = (entry.noise_multiplier, entry.sampling_probability)
            alike[key] = alike.get(key, 0) + entry.steps
        runs = tuple((*key, steps) for key, steps in sorted(alike.items()))
        return accountants.composed_epsilon(runs, delta, accountant)

    def to_json(self):
        """The ledger as a JSON string."""
        entries = [dataclasses.asdict(entry) for entry in self.entries]
        return json.dumps({"format": _FORMAT, "entries": entries}, indent=1)

    @classmethod
    def from_json(cls, text):
        """The ledger that `to_json` wrote.

        Args:
            text: String.

        Raises:
            ValueError: If `text` is not a whole ledger.
        """
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
            return cls(tuple(Entry(**entry) for entry in content["entries"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"Argument `text` is not a whole ledger: {error}. Received: {text[:80]!r}. The "
                "steps it recorded count against the budget: restore it from a copy."
            ) from error

    def save(self, path):
        """Writes the ledger to a file, which holds the old or the new ledger at any time.

        Args:
            path: String or path-like.
        """
        path = os.path.abspath(os.fspath(path))
        # The same folder, since os.replace is atomic only within a file system.
        handle, temporary = tempfile.mkstemp(
            prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path)
        )
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path):
        """The ledger of a file that `save` wrote.

        Args:
            path: String or path-like.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is damaged, naming it.
        """
        with open(path, "rb") as file:
            content = file.read()
        try:
            return cls.from_json(content.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"Damaged ledger file {os.fspath(path)!r}. {error}") from error

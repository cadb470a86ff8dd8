"""A question about DP-SGD with one unknown, and its answer."""

import dataclasses
import math

from tfdpx._arguments import is_integer, is_number, require
from tfdpx.accounting import accountants, calibration
from tfdpx.accounting.doubts import doubts
from tfdpx.accounting.full_batch import exact_epsilon
from tfdpx.accounting.plan import steps_of_epochs
from tfdpx.accounting.samplings import Sampling
from tfdpx.train.config.errors import UserError, checking_flags

# All that determine each other. The rate and the length can each be said in two ways.
NAMES = (
    *("noise_multiplier", "batch_size", "sampling_probability", "num_examples"),
    *("steps", "epochs", "delta", "epsilon"),
)
_MOST_STEPS = 2**22
_LEAST_PROBABILITY = 1e-9


@dataclasses.dataclass(frozen=True)
class Question:
    """What is known of a training run; what is None is unknown.

    One of the noise, the rate, the length, delta and epsilon is left out, and solved: the least
    noise, the highest rate, the most steps, the least delta that keep within epsilon, or epsilon.
    The rate is `batch_size` of `num_examples`, or a `sampling_probability`, and what is missing of
    it is what is solved. The length is `steps` or `epochs`.

    Args:
        noise_multiplier: Float >= 0.
        batch_size: Int.
        sampling_probability: Float in (0, 1].
        num_examples: Int.
        steps: Int.
        epochs: Float > 0.
        delta: Float in (0, 1).
        epsilon: Float > 0.
        sampling: `Sampling`.
        accountant: The accountant that solves, or None for the tightest of the sampling.

    Raises:
        UserError: If a value is out of its range, or there is not one unknown.
    """

    noise_multiplier: float | None = None
    batch_size: int | None = None
    sampling_probability: float | None = None
    num_examples: int | None = None
    steps: int | None = None
    epochs: float | None = None
    delta: float | None = None
    epsilon: float | None = None
    sampling: Sampling = Sampling()
    accountant: str | None = None

    def __post_init__(self):
        if self.accountant is None:
            object.__setattr__(self, "accountant", self.sampling.accountants[0])
        with checking_flags():
            self._check()
        _ = self.unknown

    def _check(self):
        for name in ("batch_size", "num_examples", "steps"):
            value = getattr(self, name)
            if value is not None:
                require(is_integer(value, 1), name, value, "be an int >= 1")
        if self.noise_multiplier is not None:
            accountants.check_noise_multiplier(self.noise_multiplier)
        if self.sampling_probability is not None:
            accountants.check_probability(self.sampling_probability)
        if self.epochs is not None:
            steps_of_epochs(self.epochs, 1.0)
        if self.delta is not None:
            accountants.check_delta(self.delta)
        if self.epsilon is not None:
            fits = is_number(self.epsilon) and 0 < self.epsilon < math.inf
            require(fits, "epsilon", self.epsilon, "be positive and finite")
        must = f"be one of {list(self.sampling.accountants)} for {self.sampling.name} sampling"
        require(self.accountant in self.sampling.accountants, "accountant", self.accountant, must)
        if self.batch_size is not None and self.num_examples is not None:
            fits, must = self.batch_size <= self.num_examples, "not exceed --num_examples"
            require(fits, "batch_size", self.batch_size, must)
        for names in (("steps", "epochs"), ("batch_size", "num_examples", "sampling_probability")):
            if all(getattr(self, name) is not None for name in names):
                listed = " ".join(f"--{name}={getattr(self, name)}" for name in names)
                raise UserError(f"Each of {listed} follows from the rest: leave one of them out.")

    @property
    def unknown(self):
        """The name of what is to be solved.

        Raises:
            UserError: If there is not one.
        """
        given = {name for name in NAMES if getattr(self, name) is not None}
        missing = [name for name in ("noise_multiplier", "delta", "epsilon") if name not in given]
        if not given & {"steps", "epochs"}:
            missing.append("steps")
        rate = {"batch_size", "num_examples"}
        if "sampling_probability" not in given and not rate <= given:
            missing.append((sorted(rate - given) if rate & given else ["sampling_probability"])[0])
        if len(missing) != 1:
            flags = ", ".join(f"--{name}" for name in missing) or "none"
            raise UserError(
                "One quantity is solved from all others, so exactly one must be left out of: "
                "--noise_multiplier; --batch_size and --num_examples, or --sampling_probability; "
                f"--steps or --epochs; --delta; --epsilon. Missing: {flags}."
            )
        return missing[0]

    def answer(self):
        """The question with what was unknown, and what follows from it.

        Returns:
            `Answer`.

        Raises:
            UserError: If nothing meets `epsilon`, or the accountant cannot resolve the loss.
        """
        with checking_flags():
            return self._answered()

    def _answered(self):
        unknown, known = self.unknown, dict(vars(self))
        if unknown == "epsilon":
            spent = self._spent(known, self.accountant)
            return Answer(**self._whole({**known, "epsilon": spent}), solved=unknown)
        if unknown == "delta":
            run = (self.noise_multiplier, self._probability(known), self._steps(known))
            delta = self.sampling.delta(*run, self.epsilon, self.accountant)
            if not 0 < delta < 1:
                raise UserError(
                    f"No delta between 0 and 1 belongs to --epsilon={self.epsilon}: it would be "
                    f"{delta:g}. Give another --epsilon, or --delta and no --epsilon."
                )
            return Answer(**self._whole({**known, "delta": delta}), solved=unknown)
        value = self._solved(unknown, known)
        return Answer(**self._whole({**known, unknown: value}), solved=unknown)

    def _solved(self, unknown, known):
        """The value with the greatest epsilon that is not above the target."""
        # Epsilon grows with what the search varies: with the inverse of noise and of examples.
        least_inverse, most_inverse = (
            1 / calibration.MAX_NOISE_MULTIPLIER,
            1 / calibration.MIN_NOISE_MULTIPLIER,
        )
        low, high, value_of = {
            "noise_multiplier": (least_inverse, most_inverse, lambda inverse: 1 / inverse),
            "steps": (1, _MOST_STEPS, int),
            "batch_size": (1, self.num_examples, int),
            "sampling_probability": (_LEAST_PROBABILITY, 1.0, float),
            "num_examples": (
                _LEAST_PROBABILITY,
                1.0,
                lambda rate: math.ceil(self.batch_size / rate),
            ),
        }[unknown]

        def spent(value, accountant=self.accountant):
            return self._spent({**known, unknown: value_of(value)}, accountant)

        def fits(value):
            return self._spent({**known, unknown: value}, self.accountant) <= self.epsilon

        found = calibration.largest_within(spent, self.epsilon, low, high, self.accountant)
        value = value_of(found)
        if unknown == "num_examples":
            step = max(1, value // 10**6)  # As near as it is worth: a search for fewer takes long.
            while not fits(value) and value < self.batch_size / _LEAST_PROBABILITY:
                value += step
            while value - step >= self.batch_size and fits(value - step):
                value -= step
        elif isinstance(low, int):
            while not fits(value) and value > 1:
                value -= 1
            while value < high and fits(value + 1):
                value += 1
        elif not fits(value):
            value *= 1 + 1e-5 if unknown == "noise_multiplier" else 1 - 1e-5
        if not fits(value):
            raise UserError(
                f"No --{unknown} keeps within --epsilon={self.epsilon}: {unknown}={value:g} spends "
                f"{self._spent({**known, unknown: value}, self.accountant):.4g}. Raise --epsilon, "
                "or take more noise, fewer steps, smaller batches."
            )
        bounded = unknown in ("batch_size", "sampling_probability", "num_examples")
        if found >= high * (1 - 1e-5) and not bounded:
            raise UserError(
                f"--epsilon={self.epsilon} does not bound --{unknown}: {unknown}={value:g} keeps "
                "within it. Lower --epsilon, or give the value."
            )
        return value

    def _spent(self, values, accountant):
        run = (values["noise_multiplier"], self._probability(values), self._steps(values))
        if accountant not in self.sampling.accountants:
            accountant = self.accountant
        return self.sampling.epsilon(*run, values["delta"], accountant)

    @staticmethod
    def _probability(values):
        if values["sampling_probability"] is not None:
            return values["sampling_probability"]
        return values["batch_size"] / values["num_examples"]

    def _steps(self, values):
        if values["steps"] is not None:
            return values["steps"]
        return steps_of_epochs(values["epochs"], self._probability(values))

    def _whole(self, values):
        """`values` with the rate and the length said in every way that is known."""
        rate, steps = self._probability(values), self._steps(values)
        size, count = values["batch_size"], values["num_examples"]
        if count is None and size is not None:
            count = round(size / rate)
        elif size is None and count is not None:
            size = max(1, round(count * rate))
        return {
            **values,
            "sampling_probability": rate,
            "batch_size": size,
            "num_examples": count,
            "steps": steps,
            "epochs": steps * rate,
        }


@dataclasses.dataclass(frozen=True)
class Answer(Question):
    """A `Question` with nothing unknown.

    Args:
        solved: The name of what was solved.
    """

    solved: str | None = None

    def __post_init__(self):
        pass

    def epsilon_by(self, accountant):
        """Epsilon by "pld", "rdp", or exactly by "gdp"; None where this cannot be said.

        Args:
            accountant: One of these names.
        """
        run = (self.noise_multiplier, self.sampling_probability, self.steps)
        if accountant == "gdp":
            return self._exactly(run)
        if accountant not in self.sampling.accountants:
            return None
        try:
            return self.sampling.epsilon(*run, self.delta, accountant)
        except ValueError:  # The values are in range: the loss is too small to resolve.
            return None

    def _exactly(self, run):
        if self.sampling.name == "without_replacement":
            return None
        noise_multiplier, probability, steps = self.sampling.run(*run)
        if probability < 1 or not noise_multiplier:
            return None
        return float(exact_epsilon(math.sqrt(steps) / noise_multiplier, self.delta))

    def doubts(self):
        """List of strings: what is doubtful of it."""
        return doubts(self.epsilon, self.delta, self.num_examples, self.noise_multiplier)

    def record(self):
        """Dict of JSON values: all quantities, what was solved, and epsilon by each accountant."""
        return {
            "solved": self.solved,
            **{name: getattr(self, name) for name in NAMES},
            "epsilon_pld": self.epsilon_by("pld"),
            "epsilon_rdp": self.epsilon_by("rdp"),
            "epsilon_gdp": self.epsilon_by("gdp"),
            "accountant": self.accountant,
            "sampling": self.sampling.name,
            "neighbours": self.sampling.neighbours,
            "is_exact": self.sampling.name == "poisson",
        }

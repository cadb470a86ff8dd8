"""What a training costs, or what a budget buys: one quantity, solved from all others."""

import dataclasses
import math
from typing import Any

from tfdpx._arguments import exactly_one_missing
from tfdpx.accounting import calibration
from tfdpx.accounting.gaussian import exact_epsilon
from tfdpx.accounting.groups import Sampling
from tfdpx.accounting.plan import plan_warnings
from tfdpx.train.errors import UserError, checking_flags

# All that determine each other. The rate and the length can each be said in two ways.
NAMES = (
    *("noise_multiplier", "batch_size", "sampling_probability", "num_examples"),
    *("steps", "epochs", "delta", "epsilon"),
)
_RATE = ("batch_size", "num_examples", "sampling_probability")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """All quantities of a training.

    Attributes:
        solved: The name of the one that was solved.
        noise_multiplier: Float >= 0.
        batch_size: Int; None if neither it nor `num_examples` is known.
        sampling_probability: Float in (0, 1].
        num_examples: Int, or None likewise.
        steps: Int.
        epochs: Float.
        delta: Float.
        epsilon: Float.
        sampling: `Sampling`.
        accountant: The accountant that solved.
    """

    solved: str
    noise_multiplier: float
    batch_size: int | None
    sampling_probability: float
    num_examples: int | None
    steps: int
    epochs: float
    delta: float
    epsilon: float
    sampling: Sampling
    accountant: str

    def epsilon_by(self, accountant: str) -> float | None:
        """Epsilon by "pld", "rdp", or exactly by "gdp"; None where this cannot be said."""
        run = (self.noise_multiplier, self.sampling_probability, self.steps)
        if accountant == "gdp":
            if self.sampling.name == "without_replacement":
                return None
            noise_multiplier, probability, steps = self.sampling.run(*run)
            if probability < 1 or not noise_multiplier:
                return None
            return exact_epsilon(math.sqrt(steps) / noise_multiplier, self.delta)
        if accountant not in self.sampling.accountants:
            return None
        try:
            return self.sampling.epsilon(*run, self.delta, accountant)
        except ValueError:  # The values are in range: the loss is too small to resolve.
            return None

    @property
    def warnings(self) -> list[str]:
        """Sentences on what is hardly meant."""
        return plan_warnings(self.epsilon, self.delta, self.num_examples, self.noise_multiplier)

    def record(self) -> dict[str, Any]:
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


def answer(
    given: dict[str, Any], sampling: Sampling | None = None, accountant: str | None = None
) -> Answer:
    """Solves for the quantity that is left out, as `tfdpx.PrivacyPlan` does.

    One of the noise, the rate, the length, delta and epsilon is left out, and solved: the least
    noise, the highest rate, the most steps, the least delta that keep within epsilon, or epsilon.
    The rate is `batch_size` of `num_examples`, or a `sampling_probability`, and what is missing of
    it is what is solved. The length is `steps` or `epochs`.

    Args:
        given: Dict of any of `NAMES`; None is unknown.
        sampling: `Sampling`; Poisson sampling if left out.
        accountant: The accountant that solves; the tightest of the sampling if left out.

    Raises:
        UserError: If a value is out of its range, there is not one unknown, nothing meets
            `epsilon`, or the accountant cannot resolve the loss.
    """
    sampling = sampling or Sampling()
    accountant = accountant or sampling.accountants[0]
    known = {name: given[name] for name in NAMES if given.get(name) is not None}
    with checking_flags():
        sampling.check_accountant(accountant)
        calibration.check(known)
        unknown = _unknown(known)
        if unknown == "epsilon":
            run = calibration.run_of(known)
            value = sampling.epsilon(*run, known["delta"], accountant)
        elif unknown == "delta":
            calibration.check_target(known["epsilon"])
            value = sampling.delta(*calibration.run_of(known), known["epsilon"], accountant)
            if not 0 < value < 1:
                raise UserError(
                    f"No delta between 0 and 1 belongs to --epsilon={known['epsilon']}: it would "
                    f"be {value:g}. Give another --epsilon, or --delta and no --epsilon."
                )
        else:
            value = calibration.solve(unknown, known, accountant, sampling.epsilon)
    known[unknown] = value
    _, rate, steps = calibration.run_of(known)
    size, count = known.get("batch_size"), known.get("num_examples")
    if count is None and size is not None:
        count = round(size / rate)
    elif size is None and count is not None:
        size = max(1, round(count * rate))
    known |= {"sampling_probability": rate, "batch_size": size, "num_examples": count}
    known |= {"steps": steps, "epochs": steps * rate}
    return Answer(solved=unknown, sampling=sampling, accountant=accountant, **known)


def _unknown(known):
    """The name of what is to be solved."""
    for names in (("steps", "epochs"), _RATE):
        if all(name in known for name in names):
            listed = " ".join(f"--{name}={known[name]}" for name in names)
            raise UserError(f"Each of {listed} follows from the rest: leave one of them out.")
    sizes = {name: known.get(name) for name in _RATE[:2]}
    if "sampling_probability" in known or not any(sizes.values()):
        sizes = {"sampling_probability": known.get("sampling_probability")}
    values = {name: known.get(name) for name in ("noise_multiplier", "delta", "epsilon")}
    steps = known.get("steps", known.get("epochs"))
    return exactly_one_missing({**values, **sizes, "steps": steps}, "--{}")

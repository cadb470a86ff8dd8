"""Which accountants know which sampling, under which neighbours; a refusal where none does.

A plan's own batches are Poisson samples, and its neighbours differ by one example that is added or
removed. Others sample otherwise. This file says for each pair what happened, in the events of
dp_accounting, and leaves the judgement to its accountants. Noise is always in units of the clip, so
where an example is replaced, which moves the sum by up to twice the clip, the Gaussian mechanism
has half the noise multiplier.
"""

import dataclasses
import math

import dp_accounting
from dp_accounting.rdp import rdp_privacy_accountant

from tfdpx._arguments import check_choice, require
from tfdpx.accounting import accountants

SAMPLINGS = ("poisson", "shuffle", "without_replacement", "with_replacement")
NEIGHBOURS = ("add_or_remove_one", "zero_out", "replace_one")

# What each sampling is judged under, if nothing else is asked for.
USUAL_NEIGHBOURS = {
    "poisson": "add_or_remove_one",
    "shuffle": "zero_out",
    "without_replacement": "replace_one",
    "with_replacement": "replace_one",
}

_REFUSED = {
    ("poisson", "replace_one"): (
        "No accountant here judges Poisson sampling where an example is replaced. Use "
        "neighbours='add_or_remove_one': replacing is removing and adding, so an (epsilon, delta) "
        "of it implies (2 epsilon, (1 + e^epsilon) delta)."
    ),
    ("shuffle", "add_or_remove_one"): (
        "Where batches are cut from a permutation, an example that is removed moves all behind it "
        "into other batches, and no accountant judges that. Use neighbours='zero_out': the "
        "example's place stays, and is empty."
    ),
    ("without_replacement", "add_or_remove_one"): (
        "The accountant of batches of a fixed size knows neighbours of one size alone. Use "
        "neighbours='replace_one'."
    ),
    ("without_replacement", "zero_out"): (
        "The accountant of batches of a fixed size was proven for replaced examples. Use "
        "neighbours='replace_one'."
    ),
}
_WITH_REPLACEMENT = (
    "dp_accounting has an event for sampling with replacement and no accountant that judges it: an "
    "example may be drawn several times into one batch. Use sampling='without_replacement' or "
    "'poisson', and draw so."
)

_ABOUT = {
    "poisson": "exact for batches that are really Poisson sampled",
    "shuffle": (
        "an upper bound without amplification: each example is in one batch an epoch, and no "
        "accountant says what shuffling takes off. It is not the epsilon of Poisson sampling, "
        "which can be too low for shuffled batches (Chua et al. 2024, 'How Private are DP-SGD "
        "Implementations?')"
    ),
    "without_replacement": (
        "an upper bound (Wang, Balle and Kasiviswanathan 2019, Theorem 27, by RDP): no tight "
        "accountant exists"
    ),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How batches are drawn, and which data sets are neighbours.

    Args:
        name: One of `SAMPLINGS`. "shuffle" cuts batches from a permutation of the data, a new one
            every epoch, and drops what is left over; "without_replacement" draws each batch anew, a
            subset of fixed size.
        neighbours: One of `NEIGHBOURS`, or None for the usual ones of the sampling. "zero_out"
            puts an example without content in the place of one.

    Raises:
        ValueError: If an argument is none of these, or no accountant judges the two together.
    """

    name: str = "poisson"
    neighbours: str | None = None

    def __post_init__(self):
        check_choice("sampling", self.name, SAMPLINGS)
        if self.neighbours is None:
            object.__setattr__(self, "neighbours", USUAL_NEIGHBOURS[self.name])
        check_choice("neighbours", self.neighbours, NEIGHBOURS)
        refused = _REFUSED.get((self.name, str(self.neighbours)))
        if self.name == "with_replacement":
            refused = _WITH_REPLACEMENT
        if refused:
            raise ValueError(
                f"{refused} Received: sampling={self.name!r}, neighbours={self.neighbours!r}."
            )

    @property
    def accountants(self) -> tuple[str, ...]:
        """Tuple of the names of the accountants that know it."""
        return ("rdp",) if self.name == "without_replacement" else ("pld", "rdp")

    @property
    def about(self) -> str:
        """String: what their epsilon is."""
        return _ABOUT[self.name]

    def run(
        self, noise_multiplier: float, sampling_probability: float, steps: int
    ) -> tuple[float, float, int]:
        """What an accountant of Poisson sampling is to be asked: `(noise, probability, steps)`.

        Not for "without_replacement", which is no such run.

        Args:
            noise_multiplier: Float >= 0, in units of the clip.
            sampling_probability: Float in (0, 1]: batch size over number of examples.
            steps: Int >= 0.
        """
        if self.neighbours == "replace_one":
            noise_multiplier = noise_multiplier / 2
        if self.name == "shuffle":
            steps_an_epoch = max(1, math.floor(1 / sampling_probability * (1 + 1e-12)))
            # Without sampling: whoever knows the order knows which step an example was in.
            return noise_multiplier, 1.0, math.ceil(steps / steps_an_epoch)
        return noise_multiplier, sampling_probability, steps

    def epsilon(
        self,
        noise_multiplier: float,
        sampling_probability: float,
        steps: int,
        delta: float,
        accountant: str,
    ) -> float:
        """The epsilon of `steps` updates at `delta`, or a bound on it, as `about` says.

        Args:
            noise_multiplier: Float >= 0. Standard deviation of the noise over `l2_norm_clip`,
                whatever the neighbours are.
            sampling_probability: Float in (0, 1]: batch size over number of examples.
            steps: Int >= 0.
            delta: Float in (0, 1).
            accountant: One of `accountants`.

        Returns:
            Float.

        Raises:
            ValueError: If an argument is out of its range, or the accountant does not know this.
        """
        self.check_accountant(accountant)
        if self.name != "without_replacement":
            run = self.run(noise_multiplier, sampling_probability, steps)
            return accountants.epsilon(*run, delta, accountant)
        accountants.check_delta(delta)
        run = noise_multiplier, sampling_probability, steps
        if not self._is_spent(*run):
            return 0.0 if steps == 0 else math.inf
        return float(self._composed(*run).get_epsilon(delta * (1 - accountants.RESERVED_SHARE)))

    def delta(
        self,
        noise_multiplier: float,
        sampling_probability: float,
        steps: int,
        epsilon: float,
        accountant: str,
    ) -> float:
        """The least delta at which `steps` updates keep within `epsilon`, as `epsilon` finds it.

        Args:
            noise_multiplier: As for `epsilon`.
            sampling_probability: As for `epsilon`.
            steps: As for `epsilon`.
            epsilon: Float > 0.
            accountant: As for `epsilon`.

        Returns:
            Float in [0, 1].

        Raises:
            ValueError: As `epsilon`.
        """
        self.check_accountant(accountant)
        run = noise_multiplier, sampling_probability, steps
        if not self._is_spent(*run):
            return 0.0 if steps == 0 else 1.0
        if self.name == "without_replacement":
            found = self._composed(*run).get_delta(epsilon)
        else:
            found = accountants.composed((self.run(*run),), accountant).get_delta(epsilon)
        return min(1.0, float(found) / (1 - accountants.RESERVED_SHARE))

    def check_accountant(self, accountant: str) -> None:
        """Raises ValueError unless `accountant` judges this sampling."""
        must = f"be one of {list(self.accountants)} for sampling={self.name!r}"
        require(accountant in self.accountants, "accountant", accountant, must)

    def _is_spent(self, noise_multiplier, sampling_probability, steps):
        accountants.check_run(noise_multiplier, sampling_probability, steps)
        return noise_multiplier > 0 and steps > 0

    def _composed(self, noise_multiplier, sampling_probability, steps):
        accountant = rdp_privacy_accountant.RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        # Of the two sizes the accountant reads their quotient alone.
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            source_dataset_size=1, sample_size=sampling_probability, event=gaussian
        )
        return accountant.compose(event, steps)

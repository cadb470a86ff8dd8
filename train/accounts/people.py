"""The epsilon of a person with several examples, if updates draw examples or people."""

import dataclasses
import math
import textwrap

from tfdpx.accounting import accountants, calibration
from tfdpx.accounting.groups import group_epsilon
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.statement import rounded_up
from tfdpx.train.errors import UserError


@dataclasses.dataclass(frozen=True)
class People:
    """What protects all examples of a person together.

    With people of k examples each, an update of B examples has B / k people, whose mean gradients
    are clipped at C each: noise of C sigma / k on their sum has then the same
    ratio to the signal as C sigma to the sum of B gradients.

    Attributes:
        rows: Int k, the most examples of a person.
        by_rows: Float, epsilon if updates draw examples.
        by_people: Float, epsilon if they draw people at the same sampling probability and a k-th of
            the noise multiplier; None below the least noise that the accountants take.
    """

    rows: int
    by_rows: float
    by_people: float | None

    def record(self):
        """Dict of JSON values."""
        return {
            "rows_per_user": self.rows,
            "epsilon_of_user": self.by_rows,
            "epsilon_of_user_drawing_people": self.by_people,
        }

    def about(self):
        """Sentences for people."""
        text = f"A person with {self.rows} examples has epsilon {_said(self.by_rows)}"
        if self.by_people is None:
            return _filled(
                f"{text}; if updates drew people, the noise would be too small to count."
            )
        text += (
            f" as examples are drawn, and {_said(self.by_people)} if updates draw people, with the "
            "same noise on the mean gradient."
        )
        if self.by_rows <= self.by_people:
            better = "Drawing examples costs less here, if nobody has more"
        else:
            better = 'Drawing people costs less here: PrivacyPlan(unit="user")'
        return _filled(f"{text} {better}. docs/users.md has what each learns.")


def people_of(answer, rows):
    """The `People` of a solved question.

    Args:
        answer: `tfdpx.train.accounts.question.Answer`.
        rows: Int k.

    Raises:
        UserError: If batches are not Poisson samples, or there are fewer examples.
    """
    if answer.num_examples is not None and rows > answer.num_examples:
        raise UserError(
            "Flag --rows_per_user must not exceed --num_examples. Received: "
            f"--rows_per_user={rows} --num_examples={answer.num_examples}."
        )
    if answer.sampling.name != "poisson":
        raise UserError(
            "Flag --rows_per_user needs --sampling=poisson. Received: "
            f"--sampling={answer.sampling.name}."
        )
    noise, run = answer.noise_multiplier, (answer.sampling_probability, answer.steps)
    ledger = Ledger((Entry(noise, *run),))
    by_rows = group_epsilon(ledger, rows, delta=answer.delta, accountant=answer.accountant)
    by_people = None
    if not noise or noise / rows >= calibration.MIN_NOISE_MULTIPLIER:
        by_people = accountants.epsilon(noise / rows, *run, answer.delta, answer.accountant)
    return People(rows, by_rows, by_people)


def _said(epsilon):
    return rounded_up(epsilon) if epsilon < math.inf else "infinite"


def _filled(text):
    return textwrap.fill(text, 88)

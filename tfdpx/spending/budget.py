"""What a plan still pays for, by the ledger of the weights that an optimizer trains."""

import bisect
import math

from tfdpx._keras import model_internals
from tfdpx._warnings import warn
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.spent import NOTHING, Spent

_DP_OPTIMIZER_ATTRIBUTES = ("batch_size", "noise_multiplier", "l2_norm_clip", "ledger")


class BudgetExceeded(RuntimeError):
    """The privacy budget does not pay for the next step."""


def check_optimizer(optimizer, plan):
    """The tfdpx optimizer inside of `optimizer`, if it spends what `plan` counts.

    Args:
        optimizer: The optimizer that a model is compiled with.
        plan: A `PrivacyPlan`.

    Raises:
        TypeError: If `optimizer` is not a tfdpx optimizer.
        ValueError: If its batch_size or noise_multiplier is not the plan's.
    """
    optimizer = model_internals.innermost(optimizer)
    missing = [name for name in _DP_OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, name)]
    if missing:
        raise TypeError(
            "A PrivacyPlan needs a model compiled with a private optimizer. Received: "
            f"optimizer of type {type(optimizer).__name__}, without {', '.join(missing)}. "
            "Compile with optimizer=tfdpx.DPSGD(...)."
        )
    for name in ("batch_size", "noise_multiplier"):
        planned, actual = getattr(plan, name), getattr(optimizer, name)
        # Not ==, since a checkpoint or a config may have kept float32.
        if not math.isclose(planned, actual, rel_tol=1e-6):
            raise ValueError(
                f"The plan and the optimizer disagree on `{name}`. Received: plan.{name}="
                f"{planned}, optimizer.{name}={actual}. Pass `plan=plan` to the optimizer."
            )
    known = optimizer.plan
    if known is not None and known.num_examples != plan.num_examples:
        raise ValueError(
            "The plan and the optimizer disagree on `num_examples`. Received: plan.num_examples="
            f"{plan.num_examples}, optimizer.plan.num_examples={known.num_examples}. Pass "
            "`plan=plan` to the optimizer."
        )
    return optimizer


def steps_taken(optimizer, plan=None):
    """The number of updates behind the weights that a tfdpx optimizer trains, an int.

    Args:
        optimizer: A tfdpx optimizer.
        plan: Optional `PrivacyPlan`: only updates that it knows.
    """
    ledger = optimizer.ledger
    if plan is None:
        return ledger.steps
    return ledger.assuming(plan.sampling_probability).of(plan).steps


def updates_left(optimizer):
    """The number of updates that an optimizer has left of its own plan, an int; may be negative.

    Updates that the plan knows count, whoever made them, and those of the optimizer itself,
    whatever the data were. What others have spent on the weights does not: that is for
    `PrivacyBudget`, which keeps the epsilon of all together.

    Args:
        optimizer: A tfdpx optimizer with a plan.
    """
    plan = optimizer.plan
    ledger = optimizer.ledger.assuming(plan.sampling_probability)
    known = set(ledger.of(plan).entries)
    made = optimizer.spend_tracker.made
    return plan.steps - sum(e.steps for e in ledger.entries if e in known or made(e.run))


def plan_left(optimizer, plan):
    """Int: the steps of a plan that were not taken; negative if more were.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
    """
    return plan.steps - steps_taken(optimizer, plan)


def steps_left(optimizer, plan, sampling_probability=None):
    """The number of updates that a plan still pays for, an int; may be negative.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`, which counts for all that was spent on the weights.
        sampling_probability: Optional float, of the updates to come if it is above the plan's.
    """
    ledger = optimizer.ledger.assuming(plan.sampling_probability)
    known = ledger.of(plan).steps
    left = plan.steps - known
    other = ledger.steps - known - sum(e.steps for e in ledger.entries if e in plan.spent.entries)
    rate = max(sampling_probability or 0.0, plan.sampling_probability)
    if left <= 0 or not other and math.isclose(rate, plan.sampling_probability):
        return left
    spent = ledger.composed_epsilon(plan.delta, plan.accountant)
    if other:
        warn(
            f"{other} updates of the model's weights are not this plan's. They count: epsilon is "
            f"{spent:.4g} now, and composes with the plan's steps."
        )
    kind = (plan.noise_multiplier, rate)

    def exceeds(steps):
        more = Ledger((Entry(*kind, steps, unit=plan.unit),))
        return (ledger + more).composed_epsilon(plan.delta, plan.accountant) > plan.epsilon

    if spent > plan.epsilon:
        return 0
    # How many of 1, 2, ..., left steps do not exceed.
    return bisect.bisect_left(range(1, left + 1), True, key=exceeds)


def used_up(optimizer, plan):
    """The `BudgetExceeded` that says how much of a plan was spent.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
    """
    taken = steps_taken(optimizer, plan)
    return BudgetExceeded(
        f"The privacy budget is used up: {taken} of {plan.steps} steps were taken, at "
        f"epsilon={epsilon_spent(optimizer, plan):.4g}, delta={plan.delta}. To train on, compile "
        f"with an optimizer of a longer plan, `tfdpx.PrivacyPlan(..., steps={taken + 1})` or more: "
        "its epsilon counts these steps too."
    )


def epsilon_log(plan, optimizer, before=NOTHING):
    """The epsilon that was spent on the optimizer's weights, by its name in the logs."""
    approximate = plan.is_approximate or optimizer.epsilon_is_approximate
    name = "epsilon_approximate" if approximate else "epsilon"
    return {name: epsilon_spent(optimizer, plan, before)}


def epsilon_spent(optimizer, plan, before=NOTHING):
    """Float: the epsilon of all updates behind the weights that an optimizer trains.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`: gives delta, the accountant, and a sampling probability for updates
            where none is known.
        before: `tfdpx.accounting.spent.Spent` on the same data that the ledger does not hold.
    """
    spent = Spent(optimizer.ledger.assuming(plan.sampling_probability))
    return (before + spent).epsilon(plan.delta, plan.accountant)

"""Which model a table gets, and how it is trained: a rule of epsilon times rows.

The rule was fitted on generated tables by `python -m experiments.tables.fit_rule`.
"""

import dataclasses

import keras

import tfdpx

_HIDDEN = 64
_NETWORK_FROM = 30_000  # Epsilon times rows.
_STEPS = {"linear": 40, "network": 80}
_LARGEST_RATE = {"linear": 4.0, "network": 2.0}
_MOST_ROWS = 16_384  # Of an update.


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a run trains, and how.

    Attributes:
        model: One of `settings.MODELS`.
        plan: The `tfdpx.PrivacyPlan`.
        learning_rate: Float.
    """

    model: str
    plan: tfdpx.PrivacyPlan
    learning_rate: float


def choose(settings, num_rows, spent):
    """The `Choice` for a table; what the settings say stays.

    Args:
        settings: `settings.TableSettings`.
        num_rows: Int, of the rows to train on.
        spent: `tfdpx.accounting.Ledger` of the preprocessing.

    Raises:
        ValueError: If the values do not go together.
    """
    enough = settings.epsilon * num_rows >= _NETWORK_FROM
    model = settings.model or ("network" if enough else "linear")
    plan = tfdpx.PrivacyPlan(
        num_rows,
        settings.batch_size or min(num_rows, _MOST_ROWS),
        settings.steps or _STEPS[model],
        epsilon=settings.epsilon,
        delta=settings.delta,
        accountant=settings.accountant,
        spent=spent,
    )
    rate = settings.learning_rate or min(plan.suggested_learning_rate, _LARGEST_RATE[model])
    return Choice(model, plan, rate)


def head(model, features, outputs):
    """The layers behind the preprocessing.

    Args:
        model: One of `settings.MODELS`.
        features: Int, their number.
        outputs: Int.
    """
    layers = [keras.Input((features,))]
    if model == "network":
        layers.append(keras.layers.Dense(_HIDDEN, "tanh"))
    layers.append(keras.layers.Dense(outputs, kernel_initializer="zeros"))
    return keras.Sequential(layers, name="head")

"""Which model a table gets, and how it is trained: a rule of epsilon times rows.

The rule was fitted on generated tables (docs/tables.md).
"""

import dataclasses

import keras

import tfdpx
from tfdpx.train.tables.settings import CLASSIFICATION, REGRESSION

HIDDEN = 64
_STEPS, _FEW_STEPS = 180, 60
_FEW_STEPS_BELOW = 300  # Epsilon times rows.
_NETWORK_FROM = 3_500  # Epsilon times rows.
_LINEAR_RATE = 2.0
_LARGEST_RATE = {CLASSIFICATION: 8.0, REGRESSION: 0.1}
_MOST_ROWS = 65_536  # Of an update.


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
    budget = settings.epsilon * num_rows
    model = settings.model or ("network" if budget >= _NETWORK_FROM else "linear")
    plan = tfdpx.PrivacyPlan(
        num_rows,
        settings.batch_size or min(num_rows, _MOST_ROWS),
        settings.steps or (_FEW_STEPS if budget < _FEW_STEPS_BELOW else _STEPS),
        epsilon=settings.epsilon,
        delta=settings.delta,
        accountant=settings.accountant,
        spent=spent,
    )
    rate = min(plan.suggested_learning_rate, _LARGEST_RATE[settings.task])
    if model == "linear" and not settings.is_regression:
        rate = _LINEAR_RATE  # Its classes do not depend on the scale of its weights.
    return Choice(model, plan, settings.learning_rate or rate)


def head(model, features, outputs):
    """The layers behind the preprocessing.

    Args:
        model: One of `settings.MODELS`.
        features: Int, their number.
        outputs: Int.
    """
    layers = [keras.Input((features,))]
    if model == "network":
        layers.append(keras.layers.Dense(HIDDEN, "tanh"))
    layers.append(keras.layers.Dense(outputs, kernel_initializer="zeros"))
    return keras.Sequential(layers, name="tfdpx.head")

"""What a private epoch costs: `fit(plan.batches(...))` against `fit` on shuffled batches.

Both train the same model on the same arrays, in turn in one process. An update is timed from the
moment Keras asks for its batch until it is done, so reading, sampling and padding count.
"""

import statistics
import time

import keras
import numpy as np

import tfdpx
from experiments.benchmark import comparison, models, steps
from tfdpx.training import microbatches

KINDS = ("ordinary", "private")
# Updates of one `fit`, and fresh models whose first step is timed.
_UPDATES, _FIRST = 2, 3
# Repeats that are always made, and seconds after which no more are.
_FEWEST, _ENOUGH = 3, 240.0


class Stopwatch(keras.callbacks.Callback):
    """Seconds of each update, and from `fit` to the end of the first.

    Attributes:
        first: Float.
        updates: List of floats.
    """

    def __init__(self):
        super().__init__()
        self.first, self.updates = None, []
        self._made = time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        """Starts an update."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Ends an update."""
        now = time.perf_counter()
        self.first = self.first or now - self._made
        self.updates.append(now - self._begin)


def measure(settings, num_examples, repeats):
    """The figures of the JSON object: ratios, medians in seconds, and rows.

    Args:
        settings: `steps.Settings`, whose `images` are the batch size B.
        num_examples: Int, N.
        repeats: Int, times that each kind is fitted for a few updates; fewer where they take long.
    """
    x, y = models.batch(settings.model, settings.image_size, num_examples)
    updates = _UPDATES * (repeats + 1) + _FIRST
    plan = tfdpx.PrivacyPlan(
        num_examples, settings.images, updates, noise_multiplier=1.0, delta=1e-5
    )

    def fitting(kind, model):
        if kind == "ordinary":
            return {"x": x, "y": y, "batch_size": settings.images}
        return {"x": plan.batches(x, y, optimizer=model.optimizer, seed=0)}

    def fit(arguments, model, steps_per_epoch):
        watch = Stopwatch()
        model.fit(**arguments, steps_per_epoch=steps_per_epoch, verbose=0, callbacks=[watch])
        return watch

    first = {kind: [] for kind in KINDS}
    for _ in range(_FIRST):
        for kind in KINDS:
            comparison.PROGRESS.print(f"first step: {steps.KINDS[kind]}")
            model = steps.make_model(kind, settings, plan)
            first[kind].append(fit(fitting(kind, model), model, 1).first)
    made = {kind: steps.make_model(kind, settings, plan) for kind in KINDS}
    given = {kind: fitting(kind, model) for kind, model in made.items()}
    seconds = {kind: [] for kind in KINDS}
    began = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > _FEWEST and time.perf_counter() - began > _ENOUGH:
            break
        for kind in KINDS if repeat % 2 else KINDS[::-1]:
            comparison.PROGRESS.print(f"{repeat} of {repeats}: {steps.KINDS[kind]}")
            found = fit(given[kind], made[kind], _UPDATES).updates
            seconds[kind] += found if repeat else []  # The first are not timed.
    drawn = _drawn(plan)
    [size] = microbatches.chosen_sizes(made["private"])
    computed = [size.rows(n) for n in drawn]
    median = {kind: statistics.median(found) for kind, found in seconds.items()}
    first = {kind: statistics.median(found) for kind, found in first.items()}
    return {
        "end_to_end_ratio": median["private"] / median["ordinary"],
        "first_step_ratio": first["private"] / first["ordinary"],
        "padding_rows": float(np.mean(computed) - np.mean(drawn)),
        "drawn_rows": float(np.mean(drawn)),
        "capacity": plan.capacity,
        "pass_size": size.examples,
        **{f"{kind}_seconds": value for kind, value in median.items()},
        **{f"first_{kind}_seconds": value for kind, value in first.items()},
    }


def _drawn(plan):
    """Examples of each update, as the plan draws them from seed 0."""
    batches = plan.batches(np.zeros(plan.num_examples, "uint8"), seed=0)
    return [int(np.count_nonzero(weights)) for _, _, weights in batches]

"""tfdpx's TensorBoard writes validation metrics only if they are declared public."""

import collections

import pytest
import small

import tfdpx

PLAN = tfdpx.PrivacyPlan(40, batch_size=10, steps=4, noise_multiplier=2.0, delta=1e-3)
X, Y = small.data(40)
OTHER = X[:20] + 1, Y[:20]


def make(**arguments):
    return small.model(tfdpx.DPSGD(0.1, plan=PLAN, **arguments))


def scalars(folder):
    """Reads a dict from run to the tags of all event files under `folder`."""
    from tensorflow.python.summary.summary_iterator import summary_iterator

    tags = collections.defaultdict(set)
    for path in folder.rglob("*tfevents*"):
        for event in summary_iterator(str(path)):
            tags[path.parent.name] |= {value.tag for value in event.summary.value}
    return tags


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop, declared",
    [("keras", False), ("ours", True)],
)
def test_tensorboard_writes_validation_metrics_only_if_asked(loop, declared, tmp_path, recwarn):
    board = tfdpx.callbacks.TensorBoard(tmp_path)
    arguments = {"validation_data": OTHER, "callbacks": [board], "verbose": 0}
    model = make(public_validation=declared)
    if loop == "keras":
        model.fit(PLAN.batches(X, Y), **arguments)
    else:
        tfdpx.distributed.fit(model, PLAN, X, Y, **arguments)
    assert ("epoch_loss" in scalars(tmp_path)["validation"]) == declared
    messages = [
        str(w.message) for w in recwarn if "leaves the validation metrics out" in str(w.message)
    ]
    assert bool(messages) == (not declared)

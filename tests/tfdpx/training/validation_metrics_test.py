"""What tfdpx's writers write of validation metrics, if the examples are private and if not."""

import collections

import numpy as np
import pytest
import small
from cases import slow

import tfdpx

PLAN = tfdpx.PrivacyPlan(40, batch_size=10, steps=4, noise_multiplier=2.0, delta=1e-3)
X, Y = small.data(40)
OTHER = X[:20] + 1, Y[:20]
ONE_OF_MANY = np.concatenate([OTHER[0], X[7:8]]), np.concatenate([OTHER[1], Y[7:8]])


def make(**arguments):
    return small.model(tfdpx.DPSGD(0.1, plan=PLAN, **arguments))


def scalars(folder):
    """Dict from run to the tags of all event files under `folder`."""
    from tensorflow.python.summary.summary_iterator import summary_iterator

    found = collections.defaultdict(set)
    for path in folder.rglob("*tfevents*"):
        for event in summary_iterator(str(path)):
            found[path.parent.name] |= {value.tag for value in event.summary.value}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "private, loop, word",
    [
        (1, "keras", 0),
        *(slow(1, "ours", 0), slow(1, "keras", 1), slow(0, "keras", 0)),
    ],
)
def test_tensorboard_writes_metrics_of_private_examples_only_if_asked(
    private, loop, word, tmp_path, recwarn
):
    data = ONE_OF_MANY if private else OTHER
    folders = {tmp_path / "a": False, tmp_path / "b": True}
    boards = [tfdpx.callbacks.TensorBoard(k, log_private_metrics=v) for k, v in folders.items()]
    arguments = {"validation_data": data, "callbacks": boards, "verbose": 0}
    model = make(public_validation=bool(word))
    if loop == "keras":
        model.fit(PLAN.batches(X, Y), **arguments)
    else:
        tfdpx.distributed.fit(model, PLAN, X, Y, **arguments)
    for folder, asked in folders.items():
        found, left_out = scalars(folder), private and not word
        in_validation = {"epoch_loss", "evaluation_loss_vs_iterations"} <= found["validation"]
        assert in_validation == (not left_out)
        if left_out:
            assert not found["validation"] & {"epoch_loss", "evaluation_loss_vs_iterations"}
        tags = {"not_private/epoch_val_loss", "not_private/evaluation_loss"}
        assert (tags <= found["not_private"]) == bool(left_out and asked)
        assert asked or not found["not_private"]
    said = [
        str(w.message) for w in recwarn if "leaves the validation metrics out" in str(w.message)
    ]
    assert bool(said) == bool(private and not word)


@pytest.mark.slow
def test_tensorboard_after_a_split(tmp_path):
    x, y = small.data(50)
    board = tfdpx.callbacks.TensorBoard(tmp_path)
    with pytest.warns(UserWarning, match="TensorBoard leaves .* `validation_split` are held out"):
        make().fit(PLAN.batches(x, y, validation_split=0.2), callbacks=[board], verbose=0)
    assert not scalars(tmp_path)["validation"]

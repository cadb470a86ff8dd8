"""AdaMix on a data set and public images, as a user runs it."""

import re

import numpy as np
import own_images
import pytest

from tfdpx.accounting import record as records
from tfdpx.train import adamix
from tfdpx.train.data import images


@pytest.mark.slow
def test_shots_of_the_digits(tmp_path, run, refusal):
    found, _ = run(adamix, workdir=tmp_path / "w", shots=5)
    assert found["test_accuracy"] > 0.93 and 0.98 < found["epsilon"] <= 1.0
    assert (found["num_examples"], found["num_public"], found["steps"]) == (1387, 50, 28)
    record = records.read(tmp_path / "w" / "record.json")
    assert record.is_releasable and record.epsilon == pytest.approx(found["epsilon"])
    with np.load(tmp_path / "w" / "weights.npz") as weights:
        assert weights["kernel"].shape[1] == 10 == len(weights["bias"])
    text = (tmp_path / "w" / "privacy_statement.txt").read_text()
    assert "epsilon = 0.98" in text and "The 50 public images get no guarantee" in text
    assert "holds a finished run" in refusal(adamix, workdir=tmp_path / "w", shots=5)


@pytest.mark.slow
def test_folders_of_private_and_public_images(tmp_path, run, refusal):
    own_images.write(tmp_path / "private", {3: 60, 5: 60})
    own_images.write(tmp_path / "public", {3: 66, 5: 66})
    own_images.write(tmp_path / "other", {3: 6, 7: 6})
    for path in (tmp_path / "private").glob("*/*"):
        (tmp_path / "public" / path.parent.name / path.name).unlink()
    given = dict(dataset=f"folder:{tmp_path / 'private'}", learning_rate=4.0)
    public = f"folder:{tmp_path / 'public'}"
    found, _ = run(adamix, workdir=tmp_path / "w", public_dataset=public, **given)
    assert 80 < found["num_examples"] < 112 and found["num_public"] == 12
    assert found["test_accuracy"] > 0.8
    for dataset, message in [
        (f"folder:{tmp_path / 'other'}", "same classes.*with 3, 7, for 3, 5"),
        (given["dataset"], "must name other images than --dataset"),
    ]:
        said = refusal(adamix, workdir=tmp_path / "v", public_dataset=dataset, **given)
        assert re.search(message, said)


def test_which_images_are_public_is_said_once(tmp_path, refusal):
    for given, message in [
        ({}, "Exactly one of --public_dataset and --shots"),
        ({"shots": 2, "public_dataset": "digits"}, "Exactly one of --public_dataset and --shots"),
        ({"shots": 1000}, "`shots` must leave private examples"),
        ({"shots": 2, "workdir": None}, "--workdir"),
    ]:
        assert message in refusal(adamix, **{"workdir": tmp_path / "w", **given})
    assert not (tmp_path / "w").exists()


def test_shots_are_of_each_class():
    labels = np.repeat(np.arange(3), [30, 40, 50])
    public, private = images.public_split(labels, 5, seed=3)
    assert np.bincount(labels[public]).tolist() == [5, 5, 5]
    np.testing.assert_array_equal(np.sort(np.concatenate([public, private])), np.arange(120))

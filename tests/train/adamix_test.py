"""AdaMix on a data set and public images, as a user runs it."""

import json

import numpy as np
import own_images
import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx.accounting import record as records
from tfdpx.train import adamix
from tfdpx.train.config.errors import UserError
from tfdpx.train.data import public_split


@pytest.fixture(scope="module", autouse=True)
def parsed_flags(tmp_path_factory):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["adamix"])
    with flagsaver.flagsaver(data_dir=str(tmp_path_factory.mktemp("data"))):
        yield


def values(**given):
    found = flags.FlagValues()
    adamix.define_flags(found)
    found.mark_as_parsed()
    for name, value in given.items():
        setattr(found, name, value)
    return found


def run(workdir, **given):
    with flagsaver.flagsaver(workdir=str(workdir)):
        return adamix.run(values(**given))


@pytest.mark.slow
def test_shots_of_the_digits(tmp_path, capsys):
    with flagsaver.flagsaver(workdir=str(tmp_path / "w")):
        adamix.main(["adamix"], values(shots=5))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["test_accuracy"] > 0.93 and 0.98 < found["epsilon"] <= 1.0
    assert (found["num_examples"], found["num_public"], found["steps"]) == (1387, 50, 28)
    record = records.read(tmp_path / "w" / "record.json")
    assert record.is_releasable and record.epsilon == pytest.approx(found["epsilon"])
    with np.load(tmp_path / "w" / "weights.npz") as weights:
        assert weights["kernel"].shape[1] == 10 == len(weights["bias"])
    text = (tmp_path / "w" / "privacy_statement.txt").read_text()
    assert "epsilon = 0.98" in text and "The 50 public images get no guarantee" in text
    with pytest.raises(UserError, match="holds a finished run"):
        run(tmp_path / "w", shots=5)


@pytest.mark.slow
def test_folders_of_private_and_public_images(tmp_path):
    own_images.write(tmp_path / "private", {3: 60, 5: 60})
    own_images.write(tmp_path / "public", {3: 66, 5: 66})
    own_images.write(tmp_path / "other", {3: 6, 7: 6})
    for folder in (tmp_path / "public").iterdir():
        for path in folder.iterdir():
            if (tmp_path / "private" / folder.name / path.name).exists():
                path.unlink()
    given = dict(dataset=f"folder:{tmp_path / 'private'}", learning_rate=4.0)
    found = run(tmp_path / "w", public_dataset=f"folder:{tmp_path / 'public'}", **given)
    assert (found["num_examples"], found["num_public"]) == (96, 12)
    assert found["test_accuracy"] > 0.8
    with pytest.raises(UserError, match="same classes.*with 3, 7, for 3, 5"):
        run(tmp_path / "v", public_dataset=f"folder:{tmp_path / 'other'}", **given)
    with pytest.raises(UserError, match="holds 96 of the 96 private examples"):
        run(tmp_path / "v", public_dataset=given["dataset"], **given)


def test_which_images_are_public_is_said_once(tmp_path):
    for given in ({}, {"shots": 2, "public_dataset": "digits"}):
        with pytest.raises(UserError, match="Exactly one of --public_dataset and --shots"):
            run(tmp_path / "w", **given)
    with pytest.raises(UserError, match="`shots` must leave private examples"):
        run(tmp_path / "w", shots=1000)
    with flagsaver.flagsaver(workdir=None), pytest.raises(UserError, match="--workdir"):
        adamix.run(values(shots=2))
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("shots", [1, 5, 29])
def test_a_split_has_shots_of_each_class_and_loses_none(shots):
    labels = np.repeat(np.arange(3), [30, 40, 50])
    public, private = public_split.split(labels, shots, seed=3)
    assert np.bincount(labels[public]).tolist() == [shots] * 3
    np.testing.assert_array_equal(np.sort(np.concatenate([public, private])), np.arange(120))
    assert not np.array_equal(public, public_split.split(labels, shots, seed=4)[0])
    with pytest.raises(ValueError, match="shots=30, and class 0 has 30"):
        public_split.split(labels, 30, seed=3)

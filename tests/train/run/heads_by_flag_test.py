"""`classify --head`: the head, its account and its files are those of `features` and `adamix`."""

import json

import keras
import numpy as np
import pytest
import seeds
from absl import flags
from absl.testing import flagsaver

from tfdpx.accounting import record as records
from tfdpx.train import classify, features, predict

L = keras.layers


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["classify"])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Somebody's Keras model, with batch normalization, of larger coloured images."""
    path = tmp_path_factory.mktemp("theirs") / "theirs.keras"
    seeds.fix(0)
    body = [L.Conv2D(8, 3), L.BatchNormalization(), L.ReLU(), L.MaxPooling2D(), L.Flatten()]
    keras.Sequential(
        [keras.Input((10, 10, 3)), L.Rescaling(1 / 127.5, -1), *body, L.Dense(5)]
    ).save(path)
    return str(path)


def run(capsys, **given):
    with flagsaver.flagsaver(dataset="digits", init_data="cifar10", **given):
        classify.main(["classify"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_a_head_is_fitted_and_its_model_predicts(theirs, tmp_path, capsys, monkeypatch):
    given = dict(init_from=theirs, epsilon=8.0, workdir=str(tmp_path))
    found = run(capsys, head="least_squares", **given)
    assert found["test_accuracy"] > 0.8 and found["method"] == "dp_ls"
    record = records.read(tmp_path / "head-001" / "model.keras")
    assert 7.9 < record.epsilon <= 8.0 and record.is_releasable
    assert record.view()["seen"] == ["cifar10 at epsilon inf"]

    # The whole model: images to logits, as measured.
    model = keras.saving.load_model(tmp_path / "head-001" / "model.keras", compile=False)
    weights = np.load(tmp_path / "head-001" / "weights.npz")
    images = np.random.default_rng(0).integers(0, 256, (3, 10, 10, 3)).astype("uint8")
    inside = keras.Model(model.inputs, model.layers[-1].input)(images)
    np.testing.assert_allclose(np.linalg.norm(inside, axis=1), 1.0, rtol=1e-5)
    wanted = np.asarray(inside) @ weights["kernel"] + weights["bias"]
    np.testing.assert_allclose(model(images), wanted, rtol=1e-4, atol=1e-5)
    keras.utils.save_img(tmp_path / "a.png", images[0], scale=False)
    asked = flags.FlagValues()
    predict.define_flags(asked)
    asked.mark_as_parsed()
    asked.model, asked.images = str(tmp_path / "head-001"), str(tmp_path / "a.png")
    asked.csv = str(tmp_path / "p.csv")
    assert predict.run(asked)["images"] == 1

    # A second head on the same features, which are read and not computed again.
    monkeypatch.setattr(
        features.FeatureFolder, "write", lambda *_: pytest.fail("computed a second time")
    )
    again = run(capsys, head="feature_covariance", **given)
    assert again["workdir"].endswith("head-002")


@pytest.mark.slow
def test_adamix_on_a_backbone_of_others(theirs, tmp_path, capsys):
    found = run(
        capsys, head="adamix", init_from=theirs, epsilon=3.0, shots=5, workdir=str(tmp_path)
    )
    assert found["test_accuracy"] > 0.8 and found["epsilon"] <= 3.0
    assert found["seen"] == ["cifar10 at epsilon inf"]


MISFITS = [
    ({"steps": 5}, "--steps does not go with --head=newton.*--steps=5.*it takes .*--epsilon"),
    ({"preset": "digits"}, "--preset does not go with --head"),
    ({"dry_run": True}, "--dry_run does not go with --head"),
    ({"trainable": "all"}, "trains the last layer alone: leave out --trainable"),
    ({"shots": 5}, "--shots does not go with --head=newton"),
    ({"head": None, "shots": 5}, "belong to --head=adamix"),
    ({"epsilon": None}, "needs --epsilon"),
]


def test_flags_that_do_not_fit(theirs, tmp_path):
    for given, message in MISFITS:
        given = dict(init_from=theirs, workdir=str(tmp_path), epsilon=1.0, head="newton") | given
        with flagsaver.flagsaver(dataset="digits", init_data="cifar10", **given):
            with pytest.raises(SystemExit, match=message):
                classify.main(["classify"])

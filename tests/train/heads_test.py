"""`classify --head`: features of images, the heads fitted to them, and their account."""

import re

import keras
import numpy as np
import own_images
import pytest
import seeds
from absl import flags

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.report import measure
from tfdpx.train import account, classify, heads, predict, settings
from tfdpx.train.data import images

L = keras.layers


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("backbone") / "backbone.keras"
    seeds.fix(0)
    body = [L.Conv2D(8, 3), L.BatchNormalization(), L.ReLU(), L.MaxPooling2D(), L.Flatten()]
    keras.Sequential(
        [keras.Input((10, 10, 3)), L.Rescaling(1 / 127.5, -1), *body, L.Dense(5)]
    ).save(path)
    return str(path)


@pytest.mark.slow
def test_a_head_is_fitted_and_its_model_predicts(backbone, run, refusal, tmp_path):
    arguments = dict(init_from=backbone, init_data="cifar10", dataset="digits")
    arguments |= dict(head="least_squares", epsilon=8.0, workdir=tmp_path / "run")
    report, _ = run(classify, **arguments)
    assert report["test_accuracy"] > 0.8 and report["method"] == "least_squares"
    record = records.read(tmp_path / "run" / "model.keras")
    assert 7.9 < record.epsilon <= 8.0 and record.is_releasable

    # The whole model: images to logits, from features of norm one.
    model = keras.saving.load_model(tmp_path / "run" / "model.keras", compile=False)
    images = np.random.default_rng(0).integers(0, 256, (3, 10, 10, 3)).astype("uint8")
    inside = keras.Model(model.inputs, model.layers[-1].input)(images)
    np.testing.assert_allclose(np.linalg.norm(inside, axis=1), 1.0, rtol=1e-5)
    keras.utils.save_img(tmp_path / "a.png", images[0], scale=False)
    flags = dict(model=tmp_path / "run", images=tmp_path / "a.png", csv=tmp_path / "p.csv")
    assert run(predict, **flags)[0]["images"] == 1
    assert "holds a finished run" in refusal(classify, **arguments)
    arguments |= dict(workdir=tmp_path / "new")
    del arguments["init_data"]
    assert "does not say what it was trained on" in refusal(classify, **arguments)


def test_features_are_those_of_the_images_in_order(backbone, monkeypatch):
    monkeypatch.setattr(measure, "BATCH_SIZE", 64)
    flags.FLAGS.mark_as_parsed()
    asked = dict(head="newton", dataset="digits:0-1", init_from=backbone, init_data="cifar10")
    features = heads.Features(settings.resolve(None, asked))
    assert features.data.train_y is None  # The images are not held in memory.
    data = images.load("digits:0-1", takes=(10, 10, 3))
    for x, y, (computed, labels) in [
        (data.train_x, data.train_y, features.train),
        (data.eval_x, data.eval_y, features.test),
    ]:
        np.testing.assert_allclose(computed, features.extractor(x), atol=1e-5)
        np.testing.assert_array_equal(labels, y)


HEADS = [
    {"head": "feature_covariance", "seed": 1},
    {"head": "least_squares:alpha=0.5"},
    {"head": "newton:l2_regularization=5", "steps": 2},
    {"head": "first_order:optimizer=sgd,average=true"},
    {"head": "adamix:shots=5,projection=2,quantile=0.5", "learning_rate": 8.0},
]


@pytest.mark.slow
def test_heads_are_fitted_reported_and_added_up(backbone, run, tmp_path):
    squares = 0.0
    for arguments in HEADS:
        name = arguments["head"].partition(":")[0]
        workdir = tmp_path / name
        data = dict(dataset="digits:0-2", init_from=backbone, init_data="cifar10", epsilon=4.0)
        report, _ = run(classify, workdir=workdir, **data, **arguments)
        assert report["test_accuracy"] > 0.6 and 3.8 < report["epsilon"] <= 4.0, name
        saved = records.read(workdir / "record.json")
        assert {**records.plain(saved.view()), "workdir": str(workdir)} == report
        assert saved.settings["head"] == report["method"] == arguments["head"]
        assert report["releasable"] is ("seed" not in arguments)
        text = " ".join((workdir / "privacy_statement.txt").read_text().split())
        assert re.search(r"\((3\.\d+|4(\.0+)?), 1e-05\)", text)
        is_mixed = "public images: the weights may reveal all of them" in text
        assert is_mixed == (name == "adamix")
        squares += report["releases"] / report["noise_multiplier"] ** 2
    together, _ = run(account, workdir=tmp_path)
    spent = squares**-0.5, 1.0, 1, 1e-5, "gdp"
    assert together["epsilon"] == pytest.approx(tfdpx.accounting.epsilon(*spent), rel=1e-4)


@pytest.mark.slow
def test_unfit_arguments_are_one_line(refusal, tmp_path):
    (tmp_path / "weights.npy").write_bytes(b"junk")
    junk = f"adamix:shots=5,initial_weights={tmp_path}/weights.npy"
    for arguments, message in [
        (dict(head="newton"), "--head needs --epsilon"),
        (dict(head="newton:alpha=0.5", epsilon=1.0), "Argument 'alpha' of newton does not exist"),
        (dict(head="newtom", epsilon=1.0), "Did you mean 'newton'"),
        (dict(head="adamix:shot=2,steps=3", epsilon=1.0), "'shots'.*give --steps=3"),
        (dict(head="adamix:shots=many", epsilon=1.0), "whole number or none, not 'many'.*Int, the"),
        (dict(head="adamix:shots=2,quantile=7,decay_to=a", epsilon=1.0), "quantile=7"),
        (dict(head="first_order:average=3,average=true", epsilon=1.0), "true or false, not '3'"),
        (dict(head="newton", epsilon=-1.0), "--epsilon must be positive"),
        (dict(head="least_squares", epsilon=1.0, steps=3), "--steps do not go with"),
        (dict(head="adamix", epsilon=1.0), "Exactly one of `public_dataset` and `shots`"),
        (dict(head="adamix:shots=500", epsilon=1.0), "must leave private examples"),
        (dict(head=junk, epsilon=1.0), "Cannot read initial_weights"),
        (dict(head="newton", epsilon=1.0, dry_run=True), "--dry_run belongs to images"),
        (dict(head="newton", epsilon=1.0, dataset=None), "--head needs --dataset"),
    ]:
        line = refusal(classify, workdir=tmp_path / "new", **{"dataset": "digits:0-1", **arguments})
        assert re.search(message, line), line
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_adamix_on_folders_of_private_and_public_images(tmp_path, run, refusal):
    own_images.write(tmp_path / "private", {3: 60, 5: 60})
    own_images.write(tmp_path / "public", {3: 66, 5: 66})
    own_images.write(tmp_path / "other", {3: 6, 7: 6})
    for path in (tmp_path / "private").glob("*/*"):
        (tmp_path / "public" / path.parent.name / path.name).unlink()
    (tmp_path / "private" / "3" / "broken.png").write_bytes(b"no image")
    arguments = dict(dataset=f"folder:{tmp_path / 'private'}", learning_rate=4.0, epsilon=1.0)
    arguments |= dict(workdir=tmp_path / "w")

    def head(name):
        return f"adamix:public_dataset=folder:{tmp_path / name}"

    line = refusal(classify, head=head("public"), **arguments)
    assert re.search("3/broken.png .is no image.*--skip_broken", line)
    arguments["skip_broken"] = True
    report, printed = run(classify, head=head("public"), **arguments)
    assert report["method"] == "adamix:public_dataset=folder:public"
    assert "broken, so left out: 1 (3/broken.png)" in printed and report["left_out"] == 1
    assert report["num_public"] == 12 and report["test_accuracy"] > 0.7
    for path in (tmp_path / "private").glob("*/*"):
        link = tmp_path / "links" / path.parent.name / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    same_images = "must name other images than --dataset"
    for one, other, message in [
        ("private", "other", "same classes.*with 3, 7, for 3, 5"),
        ("private", "private", same_images),
        ("private", "links", same_images),
        ("links", "private", same_images),
    ]:
        arguments |= dict(dataset=f"folder:{tmp_path / one}", workdir=tmp_path / "v")
        line = refusal(classify, head=head(other), **arguments)
        assert re.search(message, line), line

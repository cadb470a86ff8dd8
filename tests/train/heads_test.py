"""`classify --head`: features in a folder, the heads fitted to them, and their account."""

import re

import feature_folder
import keras
import numpy as np
import own_images
import pytest
import seeds

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.train import account, classify, heads, predict

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
def test_a_head_is_fitted_its_model_predicts_and_the_extraction_resumes(
    backbone, run, refusal, tmp_path, monkeypatch
):
    monkeypatch.setattr(heads, "SHARD", 500)
    arguments = dict(init_from=backbone, init_data="cifar10", dataset="digits", workdir=tmp_path)
    arguments |= dict(head="least_squares", epsilon=8.0)
    report, output = run(classify, **arguments)
    assert report["test_accuracy"] > 0.8 and report["method"] == "least_squares"
    assert "train: 1437 of 1437" in output
    record = records.read(tmp_path / "head-001" / "model.keras")
    assert 7.9 < record.epsilon <= 8.0 and record.is_releasable

    # The whole model: images to logits, as measured.
    model = keras.saving.load_model(tmp_path / "head-001" / "model.keras", compile=False)
    weights = np.load(tmp_path / "head-001" / "weights.npz")
    images = np.random.default_rng(0).integers(0, 256, (3, 10, 10, 3)).astype("uint8")
    inside = keras.Model(model.inputs, model.layers[-1].input)(images)
    np.testing.assert_allclose(np.linalg.norm(inside, axis=1), 1.0, rtol=1e-5)
    wanted = np.asarray(inside) @ weights["kernel"] + weights["bias"]
    np.testing.assert_allclose(model(images), wanted, rtol=1e-4, atol=1e-5)
    keras.utils.save_img(tmp_path / "a.png", images[0], scale=False)
    flags = dict(model=tmp_path / "head-001", images=tmp_path / "a.png", csv=tmp_path / "p.csv")
    assert run(predict, **flags)[0]["images"] == 1

    private = [tmp_path / name for name in ("train-00000.npz", "features.key")]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600, 0o600]

    # A missing shard is made again, and no other.
    (tmp_path / "train-00001.npz").unlink()
    _, output = run(classify, **arguments | dict(head="first_order", steps=3))
    assert "train: 1000 of 1437" in output and "train: 1437" not in output
    (tmp_path / "train-00003.npz").write_bytes((tmp_path / "train-00001.npz").read_bytes())
    assert "holds features of other train images" in refusal(classify, **arguments)
    other = arguments | dict(init_data="cifar100")
    assert "holds features made with" in refusal(classify, **other)
    del arguments["init_data"]
    assert "does not say what it was trained on" in refusal(classify, **arguments)


@pytest.fixture
def folder(tmp_path):
    return feature_folder.make(tmp_path / "made")


@pytest.mark.parametrize(
    "arguments",
    [
        {"head": "feature_covariance", "seed": 1},
        {"head": "least_squares", "alpha": 0.5},
        {"head": "newton", "steps": 2, "l2_regularization": 5.0},
        {"head": "first_order", "optimizer": "sgd", "average": True},
        {"head": "adamix", "shots": 5, "projection": 2, "quantile": 0.5, "learning_rate": 8.0},
    ],
)
def test_heads_are_fitted_reported_and_added_up(folder, run, arguments):
    reports = [run(classify, workdir=folder.path, epsilon=4.0, **arguments)[0] for _ in range(2)]
    report, head = reports[0], folder.path / "head-001"
    assert report["test_accuracy"] > 0.6 and 3.8 < report["epsilon"] <= 4.0
    saved = records.plain(records.read(head / "record.json").view())
    assert {**saved, "workdir": str(head)} == report
    settings = records.read(head / "record.json").settings
    assert all(settings[name] == value for name, value in arguments.items() if name in ("alpha",))
    assert np.load(head / "weights.npz")["kernel"].shape == (12, 3)
    assert report["releasable"] is ("seed" not in arguments)
    text = (head / "privacy_statement.txt").read_text()
    assert re.search(r"\((3\.\d+|4(\.0+)?), 1e-05\)", text)
    text = " ".join(text.split())
    assert ("public images: the weights may tell all of them" in text) == ("shots" in arguments)
    both, _ = run(account, workdir=folder.path)
    spent = report["noise_multiplier"], 1.0, 2 * report["releases"], 1e-5, "gdp"
    assert both["epsilon"] == pytest.approx(tfdpx.accounting.epsilon(*spent), rel=1e-6)


def test_unfit_arguments_are_one_line(folder, refusal, tmp_path):
    (tmp_path / "weights.npy").write_bytes(b"junk")
    for arguments, message in [
        (dict(head="newton"), "--head needs --epsilon"),
        (dict(head="newton", epsilon=1.0, alpha=0.5), "--alpha do not go with --head=newton"),
        (dict(head="newton", epsilon=-1.0), "--epsilon must be positive"),
        (dict(head="adamix", epsilon=1.0), "Exactly one of --public_dataset and --shots"),
        (dict(head="adamix", epsilon=1.0, shots=500), "must leave private examples"),
        (
            dict(head="adamix", epsilon=1.0, shots=5, initial_weights=f"{tmp_path}/weights.npy"),
            "Cannot read --initial_weights",
        ),
        (dict(head="newton", epsilon=1.0, dry_run=True), "--dry_run belongs to images"),
        (dict(head="newton", epsilon=1.0, image_size=9), "--image_size needs --dataset"),
    ]:
        assert message in refusal(classify, workdir=folder.path, **arguments), arguments
    arguments = dict(head="newton", epsilon=1.0)
    assert "holds no features" in refusal(classify, workdir=tmp_path / "new", **arguments)
    arguments |= dict(alpha=0.5, dataset="digits")  # Refused before features are made.
    assert "--alpha do not go" in refusal(classify, workdir=tmp_path / "new", **arguments)
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
    arguments |= dict(head="adamix", workdir=tmp_path / "w")
    public = f"folder:{tmp_path / 'public'}"
    line = refusal(classify, public_dataset=public, **arguments)
    assert re.search("3/broken.png .is no image.*--skip_broken", line)
    arguments["skip_broken"] = True
    report, printed = run(classify, public_dataset=public, **arguments)
    assert "broken, so left out: 1 (3/broken.png)" in printed and report["left_out"] == 1
    assert report["num_public"] == 12 and report["test_accuracy"] > 0.7
    for path in (tmp_path / "private").glob("*/*"):
        link = tmp_path / "links" / path.parent.name / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    for one, other in ("links", "private"), ("private", "links"):
        pair = dict(dataset=f"folder:{tmp_path / one}", public_dataset=f"folder:{tmp_path / other}")
        line = refusal(classify, **{**arguments, **pair, "workdir": tmp_path / "v"})
        assert "must name other images than --dataset" in line
    for dataset, message in [
        (f"folder:{tmp_path / 'other'}", "same classes.*with 3, 7, for 3, 5"),
        (arguments["dataset"], "must name other images than --dataset"),
    ]:
        arguments["workdir"] = tmp_path / "v"
        line = refusal(classify, public_dataset=dataset, **arguments)
        assert re.search(message, line), line

"""Runs from a Keras model that tfdpx did not write, by command."""

import re

import keras
import numpy as np
import pytest
import seeds
from PIL import Image

from tfdpx import synthetic
from tfdpx.train import classify, predict

L = keras.layers


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes by colour, one broken file."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for channel, name in enumerate(("红", "أخضر", "blue")):
        (root / name).mkdir()
        for i in range(10):
            pixels = rng.integers(0, 60, (20, 24, 3))
            pixels[..., channel] += 150
            Image.fromarray(pixels.astype("uint8")).save(root / name / f"{i}.png")
    (root / "blue" / "broken.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    path = tmp_path_factory.mktemp("theirs") / "theirs.keras"
    seeds.fix(0)
    body = [L.Conv2D(8, 3, strides=2), L.BatchNormalization(), L.ReLU(), L.GlobalAveragePooling2D()]
    body.append(L.Dense(8, use_bias=False, kernel_initializer="identity"))
    keras.Sequential(
        [keras.Input((16, 12, 3)), L.Rescaling(1 / 127.5, -1), *body, L.Dense(5)]
    ).save(path)
    return str(path)


@pytest.fixture(scope="module")
def shared_flags(photos):
    """Flags that all runs share."""
    return dict(
        dataset=f"folder:{photos}", skip_broken=True, epsilon=8.0, preset="folder", steps=3,
        accountant="rdp",
    )  # fmt: skip


@pytest.mark.slow
def test_a_keras_model_is_fine_tuned_and_its_run_started_from(
    shared_flags, photos, theirs, run, refusal, tmp_path, recwarn
):
    message = refusal(classify, workdir=tmp_path / "no", init_from=theirs, **shared_flags)
    assert re.search("does not say what it was trained on.*--init_data", message)
    first = dict(shared_flags, init_from=theirs, init_data="cifar10", workdir=tmp_path / "last")
    message = refusal(classify, **first, image_size=16)
    assert re.search("takes images of 16x12 pixels.*--image_size=16", message)
    last, printed = run(classify, **first, trainable="last")
    assert "Start from 'sequential" in printed and "broken, so left out: 1" in printed
    assert "16x12 pixels, in colour (the size that --init_from takes)" in printed
    assert last["trained_parameters"] == 3 * (8 + 1)  # One more: a constant next to the features.
    assert last["test_accuracy"] > 0.6
    assert last["seen"] == [{"dataset": "cifar10", "epsilon": "inf"}]
    assert last["epsilon"] == pytest.approx(8.0, abs=1e-3)
    assert not [w for w in recwarn if "Glyph" in str(w.message)]

    # On the same images again, from the folder of that run: the account counts both.
    again = dict(shared_flags, init_from=str(tmp_path / "last"), workdir=tmp_path / "both")
    both, printed = run(classify, **again, trainable="lora", lora_rank=2, head_steps=1)
    few = 2 * (8 + 8) + 3 * (9 + 1)  # One more for a bias next to that constant.
    assert both["trained_parameters"] == few and f"Train {few} of " in printed
    assert both["init_from"] == "last/model.keras"
    assert both["epsilon"] > 9.0 and {"dataset": "cifar10", "epsilon": "inf"} in both["seen"]
    arguments = dict(images=photos / "红", csv=tmp_path / "p.csv")
    assert run(predict, model=tmp_path / "both", **arguments)[0]["images"] == 10


def test_a_dry_run_counts_the_weights_of_the_file(theirs, run):
    record, _ = run(classify, init_from=theirs, dry_run=True, trainable="last", epsilon=1.0)
    assert (record["image_height"], record["image_width"]) == (16, 12)
    assert record["parameters"] == 3 * 3 * 3 * 8 + 8 + 4 * 8 + 8 * 8 + 10 * (8 + 1)


@pytest.mark.slow
def test_features_of_a_keras_model_are_whitened_by_generated_images(
    shared_flags, theirs, run, refusal, tmp_path
):
    flags = dict(shared_flags, features=theirs, init_data="cifar10", whiten="synthetic")
    message = refusal(classify, workdir=tmp_path / "no", **dict(flags, features="scatter"))
    assert "Flag --whiten is for files of --features" in message
    result, _ = run(classify, workdir=tmp_path / "run", **flags)
    assert result["trained_parameters"] == 3 * (8 + 1) and result["test_accuracy"] > 0.6
    assert result["seen"] == [{"dataset": "cifar10", "epsilon": "inf"}]
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert any(layer.name == "whitening" for layer in model._flatten_layers())


@pytest.mark.slow
def test_a_warm_start_costs_no_privacy(shared_flags, run, refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_IMAGES", 8)
    monkeypatch.setattr(synthetic, "_UPDATES", 3)
    flags = dict(shared_flags, image_size=12, warm_start=True)
    message = refusal(classify, workdir=tmp_path / "no", **flags)
    assert "--warm_start is for a network from random weights" in message
    flags |= dict(model="small_cnn", trainable="last", workdir=tmp_path / "run")
    trained = []
    fit = keras.Model.fit
    monkeypatch.setattr(
        keras.Model,
        "fit",
        lambda self, *a, **b: trained.append(len(self.trainable_weights)) or fit(self, *a, **b),
    )
    result, printed = run(classify, **flags)
    assert "Warm start: 8 generated images" in printed
    assert trained[0] > 10  # All layers, although the private training is of the last.
    assert result["trained_parameters"] == 3 * (3 * 3 * 64 + 1)
    assert result["epsilon"] == pytest.approx(8.0, abs=1e-3) and not result["seen"]

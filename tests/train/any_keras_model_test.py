"""Runs from a Keras model that tfdpx did not write, by command."""

import json

import keras
import numpy as np
import pytest
import seeds
from absl import flags
from absl.testing import flagsaver
from PIL import Image

from tfdpx.accounting import record as records
from tfdpx.train import classify, features, predict

L = keras.layers


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["classify"])


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
    keras.Sequential(
        [keras.Input((16, 12, 3)), L.Rescaling(1 / 127.5, -1), *body, L.Dense(5)]
    ).save(path)
    return str(path)


def values(define, **given):
    found = flags.FlagValues()
    define(found)
    found.mark_as_parsed()
    for name, value in given.items():
        setattr(found, name, value)
    return found


def run(photos, workdir, init_from, **given):
    given = {"skip_broken": True, "epsilon": 8.0, "preset": "folder", "steps": 3, **given}
    given = {"accountant": "rdp", **given}
    with flagsaver.flagsaver(
        dataset=f"folder:{photos}", workdir=str(workdir), init_from=str(init_from), **given
    ):
        classify.main(["classify"])
    return records.read(workdir / "record.json")


@pytest.mark.slow
def test_a_keras_model_is_fine_tuned_and_its_run_started_from(
    photos, theirs, tmp_path, capsys, recwarn
):
    with pytest.raises(SystemExit, match="does not say what it was trained on.*--init_data"):
        run(photos, tmp_path / "no", theirs)
    with pytest.raises(SystemExit, match="takes images of 16x12 pixels.*--image_size=16"):
        run(photos, tmp_path / "no", theirs, init_data="cifar10", image_size=16)
    last = run(photos, tmp_path / "last", theirs, init_data="cifar10", trainable="last")
    printed = capsys.readouterr().out
    assert "Start from 'sequential" in printed and "broken, so left out: 1" in printed
    assert "16x12 pixels, in colour (what --init_from takes)" in printed
    assert last.results["trained_parameters"] == 3 * (8 + 1)  # A constant beside the features.
    assert last.results["test_accuracy"] > 0.6 and last.inputs["image_shape"] == [16, 12, 3]
    assert last.view()["seen"] == ["cifar10 at epsilon inf"]
    assert last.view()["epsilon"] == pytest.approx(8.0, abs=1e-3)
    assert not [w for w in recwarn if "Glyph" in str(w.message)]

    # On the same images again, from the folder of that run: the account counts both.
    both = run(photos, tmp_path / "both", tmp_path / "last", trainable="all")
    assert both.results["init_from"] == "last/model.keras"
    assert both.view()["epsilon"] > 9.0 and "cifar10 at epsilon inf" in both.view()["seen"]
    asked = values(
        predict.define_flags,
        model=str(tmp_path / "both"), images=str(photos / "红"), csv=str(tmp_path / "p.csv"),
    )  # fmt: skip
    assert predict.run(asked)["images"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bias", "norm", "lora"])
def test_few_weights_of_a_keras_model(photos, tmp_path, capsys, word):
    seeds.fix(0)
    body = [L.Rescaling(1 / 255), L.GlobalAveragePooling2D(), L.Dense(6, use_bias=False)]
    middle = [L.LayerNormalization(), L.Dense(4)] if word != "lora" else [L.Dense(4)]
    theirs = keras.Sequential([keras.Input((8, 8, 3)), *body, *middle, L.ReLU(), L.Dense(3)])
    theirs.save(tmp_path / "theirs.keras")
    wanted = {"bias": 6 + 4, "norm": 2 * 6, "lora": 2 * (3 + 6) + 2 * (6 + 4)}[word] + 3 * (4 + 1)
    given = dict(init_data="cifar10", trainable=word, lora_rank=2, head_steps=1, learning_rate=1.0)
    first = run(photos, tmp_path / "few", tmp_path / "theirs.keras", **given)
    assert first.results["trained_parameters"] == wanted
    assert f"Train {wanted} of " in capsys.readouterr().out
    if word != "lora":
        return
    again = run(photos, tmp_path / "again", tmp_path / "few", trainable=word, lora_rank=2)
    assert again.results["trained_parameters"] == wanted and again.view()["epsilon"] > 9.0


def test_a_dry_run_counts_the_weights_of_the_file(theirs, tmp_path, capsys):
    with flagsaver.flagsaver(init_from=theirs, dry_run=True, trainable="last", epsilon=1.0):
        classify.main(["classify"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["image_height"], record["image_width"]) == (16, 12)
    assert record["parameters"] == 3 * 3 * 3 * 8 + 8 + 4 * 8 + 10 * (8 + 1)


@pytest.mark.slow
def test_features_of_a_keras_model(photos, theirs, tmp_path, capsys):
    given = dict(init_from=theirs, dataset=f"folder:{photos}", init_data="cifar10")
    with flagsaver.flagsaver(workdir=str(tmp_path)):
        with pytest.raises(SystemExit, match="blue/broken.png .is no image.*--skip_broken"):
            features.main(["features"], values(features.define_flags, **given))
        given |= dict(skip_broken=True, method="dp_ls", epsilon=8.0)
        features.main(["features"], values(features.define_flags, **given))
    printed = capsys.readouterr().out
    record = json.loads(printed.splitlines()[-1])
    assert "broken, so left out: 1 (blue/broken.png)" in printed and record["left_out"] == 1
    assert record["dimension"] == 8 and record["seen"] == ["cifar10 at epsilon inf"]

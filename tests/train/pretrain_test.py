"""Pre-training, then private fine-tuning from its file, end to end; its recipes and its account."""

import re

import keras
import numpy as np
import pytest
from absl.testing import flagsaver
from interrupting import ctrl_c_after

from tfdpx.layers import SkipInit
from tfdpx.train import classify, pretrain

SHORT = dict(dataset="digits:0-4", steps=25, report_every=10, seed=3, warmup_steps=5)
SHORT |= dict(augment_padding=1)


def weights(folder):
    return keras.saving.load_model(folder / "model.keras").get_weights()


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("pretrained")
    return workdir, run(pretrain, workdir=workdir, **SHORT)[0]


@pytest.mark.slow
def test_the_report_is_plainly_not_private(finished):
    _, record = finished
    assert record["private"] is False and record["epsilon"] == "inf"
    assert (record["steps"], record["num_examples"]) == (25, 721)
    assert record["test_accuracy"] > 0.6  # Chance is 0.2.


@pytest.mark.slow
def test_ctrl_c_ends_pretraining_in_a_line_and_the_folder_alone_resumes(
    finished, run, refusal, tmp_path, capsys
):
    workdir = tmp_path / "run"
    with pytest.raises(SystemExit) as error, ctrl_c_after(13):
        run(pretrain, workdir=workdir, **SHORT)
    assert error.value.code == 130
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "pretrain: interrupted at update 13; nothing is lost. Go on: " in last_line
    line = refusal(pretrain, workdir=workdir, resume=True, steps=30)
    assert "began with steps=25. Received: steps=30" in line
    with flagsaver.flagsaver(workdir=str(workdir), resume=True):
        pretrain.main(["pretrain"])
    for a, b in zip(weights(finished[0]), weights(workdir), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_classify_goes_on_from_the_file(finished, run, tmp_path):
    given = dict(dataset="digits:5-9", model="small_cnn", init_from=str(finished[0]))
    given |= dict(trainable="last", batch_size=256, steps=3, epsilon=2.0, accountant="rdp")
    record, _ = run(classify, workdir=tmp_path / "run", **given)
    assert record["dataset"] == "sklearn_digits:5-9" and record["num_examples"] == 716
    assert record["trained_parameters"] == 1_285 and record["parameters"] == 29_605
    assert record["private"] is True and 1.9 < record["epsilon"] <= 2
    before, after = weights(finished[0]), weights(tmp_path / "run")
    assert all(map(np.array_equal, before[:-2], after[:-2]))
    assert not any(map(np.array_equal, before[-2:], after[-2:]))


STEPPED = dict(schedule="step", warmup_steps=None)
ERRORS = [
    (dict(recipe="imagenet"), "no recipe 'imagenet'.*imagenet32"),
    (dict(recipe="jft", dataset=None), "--dataset must be given"),
    (dict(epsilon=2.0, augmult=4), "not private.*leave out --augmult, --epsilon"),
    (dict(tpu="nosuch"), "on one device: leave out --tpu"),
    (dict(strategy="mirrored", cpu_devices=2), "leave out --cpu_devices, --strategy"),
    (dict(STEPPED, decay_steps=None), "--schedule=step needs --decay_steps"),
    (dict(STEPPED, decay_steps=["a"]), "--decay_steps must be whole numbers"),
    (dict(STEPPED, decay_steps=["5", "3"]), "rise from above 0"),
    (dict(schedule="constant"), "--warmup_steps belong to"),
    (dict(warmup_steps=25), "--warmup_steps.*below --steps.*--steps=25"),
    (dict(learning_rate=0.0), "--learning_rate=0.0"),
    (dict(batch_size=5000), "`batch_size` must lie"),
    (dict(model="resnet"), "no model 'resnet'"),
    (dict(augment_padding=8), "smaller than the image"),
]


@pytest.mark.slow
def test_errors_of_the_user_are_one_line(refusal, tmp_path):
    for given, message in ERRORS:
        line = refusal(pretrain, workdir=tmp_path / "run", **{**SHORT, **given})
        assert re.search(message, line), (given, line)
        assert not (tmp_path / "run").exists()


def resolve(recipe="digits", **given):
    return pretrain.resolve(recipe, given)


def test_recipes_of_the_paper():
    cifar, imagenet = resolve("cifar100"), resolve("imagenet32")
    assert (cifar.batch_size, cifar.steps, cifar.learning_rate) == (128, 100_000, 0.1)
    assert (cifar.weight_decay, cifar.decay_steps) == (5e-4, [50_000, 75_000])
    assert (imagenet.batch_size, imagenet.steps, imagenet.learning_rate) == (1024, 240_000, 0.3)
    assert (imagenet.weight_decay, imagenet.schedule) == (5e-5, "constant")
    assert (imagenet.validation, cifar.validation) == (10_000, 0)
    jft = resolve("jft", dataset="imagenet2012", steps=6_000)
    assert (jft.schedule, jft.warmup_steps) == ("cosine", 5_000)
    assert (jft.learning_rate, jft.weight_decay, jft.image_size) == (0.4, 1e-6, 224)
    assert {r.momentum for r in (cifar, imagenet, jft)} == {0.9}


def test_branches_of_an_nf_resnet_start_at_zero(run, tmp_path, monkeypatch):
    gains = []

    def spy(model, *args, **kwargs):
        gains.extend(x.gain.numpy() for x in model._flatten_layers() if isinstance(x, SkipInit))
        raise SystemExit

    monkeypatch.setattr(keras.Model, "fit", spy)
    given = dict(recipe="jft", dataset="digits", model="nf_resnet_26", image_size=32, steps=2)
    with pytest.raises(SystemExit):
        run(pretrain, workdir=tmp_path / "run", **given, batch_size=8, warmup_steps=1)
    assert gains and not np.any(gains)


@pytest.mark.parametrize("warmup", [0, 10])
def test_the_cosine_rises_and_falls(warmup):
    given = dict(schedule="cosine", warmup_steps=warmup, steps=50, learning_rate=0.4)
    rates, steps = pretrain.learning_rates(resolve(**given)), np.arange(51)
    fall = 0.2 * (1 + np.cos(np.pi * (steps - warmup) / (50 - warmup)))
    expected = np.where(steps < warmup, 0.4 * steps / max(warmup, 1), fall)
    np.testing.assert_allclose([float(rates(i)) for i in steps], expected, atol=1e-6)


def test_learning_rates_that_are_constant_or_fall_in_steps():
    given = dict(schedule="step", decay_steps=["3", "5"], learning_rate=0.2)
    rates = pretrain.learning_rates(resolve(**given))
    expected = [0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002]
    np.testing.assert_allclose([float(rates(i)) for i in range(7)], expected, rtol=1e-5)
    assert pretrain.learning_rates(resolve(schedule="constant", learning_rate=0.3)) == 0.3


def test_weight_decay_is_added_to_the_gradient_before_the_momentum():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    pretrain.add_weight_decay(model, 0.5)
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    model.fit(np.ones([4, 1]), np.zeros([4, 1]), epochs=3, verbose=0)
    w, b, vw, vb = 1.0, 0.0, 0.0, 0.0
    for _ in range(3):
        error = 2 * (w + b)
        vw = 0.9 * vw - 0.1 * (error + 0.5 * w)
        vb = 0.9 * vb - 0.1 * (error + 0.5 * b)
        w, b = w + vw, b + vb
    np.testing.assert_allclose(np.concatenate(model.get_weights(), axis=None), [w, b], rtol=1e-5)

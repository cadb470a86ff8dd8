"""Pre-training: its report, its resumption, its refusals and the recipes of the paper."""

import re

import keras
import numpy as np
import pytest
from absl.testing import flagsaver
from interrupting import ctrl_c_after

from tfdpx.train import pretrain

SHORT = dict(dataset="digits:0-4", steps=25, report_every=10, seed=3, warmup_steps=5)
SHORT |= dict(augment_padding=1)


def weights(folder):
    return keras.saving.load_model(folder / "model.keras").get_weights()


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("pretrained")
    return workdir, run(pretrain, workdir=workdir, **SHORT)[0]


@pytest.mark.nightly
def test_ctrl_c_ends_in_a_line_and_the_folder_alone_resumes(
    finished, run, refusal, tmp_path, capsys
):
    workdir = tmp_path / "run"
    with pytest.raises(SystemExit, match="130"), ctrl_c_after(13):
        run(pretrain, workdir=workdir, **SHORT)
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "pretrain: interrupted at update 13; nothing is lost. Go on: " in last_line
    line = refusal(pretrain, workdir=workdir, resume=True, steps=30)
    assert "began with steps=25. Received: steps=30" in line
    with flagsaver.flagsaver(workdir=str(workdir), resume=True):
        pretrain.main(["pretrain"])
    assert all(map(np.array_equal, weights(finished[0]), weights(workdir)))


@pytest.mark.slow
def test_the_report_is_not_private(finished):
    record = finished[1]
    assert record["private"] is False and record["epsilon"] == "inf"
    assert (record["steps"], record["num_examples"]) == (25, 721)
    assert record["test_accuracy"] > 0.6  # Chance is 0.2.


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
    (dict(batch_size=5000), "`batch_size` must lie"),
    (dict(model="resnet"), "no model 'resnet'"),
    (dict(augment_padding=8), "smaller than the image"),
]


@pytest.mark.slow
def test_errors_of_the_user_are_one_line(refusal, tmp_path):
    for arguments, message in ERRORS:
        line = refusal(pretrain, workdir=tmp_path / "run", **{**SHORT, **arguments})
        assert re.search(message, line), (arguments, line)
        assert not (tmp_path / "run").exists()


# The paper's Table 11 and appendix C.3.
RECIPES = {
    "cifar100": dict(batch_size=128, steps=100_000, learning_rate=0.1, weight_decay=5e-4,
        decay_steps=[50_000, 75_000], momentum=0.9, validation=0),
    "imagenet32": dict(batch_size=1024, steps=240_000, learning_rate=0.3, weight_decay=5e-5,
        schedule="constant", momentum=0.9, validation=10_000),
    "jft": dict(schedule="cosine", warmup_steps=5_000, learning_rate=0.4, weight_decay=1e-6,
        momentum=0.9, image_size=224),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_of_the_paper(recipe):
    arguments = dict(dataset="imagenet2012", steps=6_000) if recipe == "jft" else {}
    settings = vars(pretrain.resolve(recipe, arguments))
    assert {name: settings[name] for name in RECIPES[recipe]} == RECIPES[recipe]


def test_learning_rates_follow_their_schedule():
    def rates(count, **arguments):
        schedule = pretrain.learning_rates(pretrain.resolve("digits", arguments))
        return [float(schedule(i)) for i in range(count)]

    stepped = rates(7, schedule="step", decay_steps=["3", "5"], learning_rate=0.2)
    np.testing.assert_allclose(stepped, [0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002], rtol=1e-5)
    for warmup in (0, 10):
        cosine, steps = rates(51, warmup_steps=warmup, steps=50, learning_rate=0.4), np.arange(51)
        fall = 0.2 * (1 + np.cos(np.pi * (steps - warmup) / (50 - warmup)))
        expected = np.where(steps < warmup, 0.04 * steps, fall)
        np.testing.assert_allclose(cosine, expected, atol=1e-6)


def test_weight_decay_is_added_to_the_gradient_before_the_momentum():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    pretrain.add_weight_decay(model, 0.5)
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    model.fit(np.ones([4, 1]), np.zeros([4, 1]), epochs=3, verbose=0)
    values, momenta = np.array([1.0, 0.0]), np.zeros(2)
    for _ in range(3):
        momenta = 0.9 * momenta - 0.1 * (2 * values.sum() + 0.5 * values)
        values = values + momenta
    np.testing.assert_allclose(np.concatenate(model.get_weights(), axis=None), values, rtol=1e-5)

"""Pre-training, then private fine-tuning from its file, end to end; its recipes and its account."""

import re

import keras
import numpy as np
import pytest
from absl.testing import flagsaver
from interrupting import ctrl_c_after

from tfdpx.train import classify, pretrain
from tfdpx.train.config import pretraining
from tfdpx.train.run import optimization

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
    told = capsys.readouterr().err.splitlines()[-1]
    assert "pretrain: interrupted at update 13; nothing is lost. Go on: " in told
    said = refusal(pretrain, workdir=workdir, resume=True, steps=30)
    assert "began with steps=25. Received: steps=30" in said
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
    fresh, tuned = weights(finished[0]), weights(tmp_path / "run")
    assert all(map(np.array_equal, fresh[:-2], tuned[:-2]))
    assert not any(map(np.array_equal, fresh[-2:], tuned[-2:]))


STEPPED = dict(schedule="step", warmup_steps=None)
ERRORS = [
    (dict(recipe="imagenet"), "no recipe 'imagenet'.*imagenet32"),
    (dict(recipe="jft", dataset=None), "--dataset must be given"),
    (dict(epsilon=2.0, augmult=4), "not private.*leave out --augmult, --epsilon"),
    (dict(STEPPED, decay_steps=None), "--decay_steps"),
    (dict(STEPPED, decay_steps=["a"]), "--decay_steps=a"),
    (dict(STEPPED, decay_steps=[5, 3]), "rise from above 0"),
    (dict(schedule="constant"), "--warmup_steps belongs"),
    (dict(warmup_steps=25), "--warmup_steps.*below --steps.*--steps=25"),
    (dict(learning_rate=0.0), "--learning_rate=0.0"),
    (dict(batch_size=5000), "`batch_size` must lie"),
    (dict(model="resnet"), "no model 'resnet'"),
    (dict(augment_padding=8), "smaller than the image"),
    (dict(augment_resize=1.2), "--augment_resize needs --image_size"),
    (dict(eval_split="validation"), "--eval_split=validation measures"),
    (dict(trainable="last"), "give --init_from"),
]


@pytest.mark.slow
def test_errors_of_the_user_are_one_line(refusal, tmp_path):
    for given, message in ERRORS:
        said = refusal(pretrain, workdir=tmp_path / "run", **{**SHORT, **given})
        assert re.search(message, said), (given, said)
        assert not (tmp_path / "run").exists()


def resolve(recipe="digits", **given):
    return pretraining.resolve(recipe, given)


def test_recipes_of_the_paper():
    cifar, imagenet = resolve("cifar100"), resolve("imagenet32")
    assert (cifar.batch_size, cifar.steps, cifar.learning_rate) == (128, 100_000, 0.1)
    assert (cifar.weight_decay, cifar.decay_steps) == (5e-4, [50_000, 75_000])
    assert (imagenet.batch_size, imagenet.steps, imagenet.learning_rate) == (1024, 240_000, 0.3)
    assert (imagenet.weight_decay, imagenet.schedule) == (5e-5, "constant")
    jft = resolve("jft", dataset="imagenet2012", steps=6_000)
    assert (jft.schedule, jft.warmup_steps) == ("cosine", 5_000)
    assert (jft.learning_rate, jft.weight_decay, jft.image_size) == (0.4, 1e-6, 224)
    assert {r.momentum for r in (cifar, imagenet, jft)} == {0.9}


def test_learning_rates_follow_their_schedule():
    stepped = optimization.learning_rates(
        resolve(schedule="step", decay_steps=[3, 5], learning_rate=0.2)
    )
    expected = [0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002]
    np.testing.assert_allclose([float(stepped(i)) for i in range(7)], expected, rtol=1e-5)
    given = dict(schedule="cosine", warmup_steps=10, steps=50, learning_rate=0.4)
    cosine, steps = optimization.learning_rates(resolve(**given)), np.arange(51)
    fall = 0.2 * (1 + np.cos(np.pi * (steps - 10) / 40))
    expected = np.where(steps < 10, 0.4 * steps / 10, fall)
    np.testing.assert_allclose([float(cosine(i)) for i in steps], expected, atol=1e-6)
    assert optimization.learning_rates(resolve(schedule="constant", learning_rate=0.3)) == 0.3


def test_weight_decay_is_added_to_the_gradient_before_the_momentum():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimization.add_weight_decay(model, 0.5)
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    model.fit(np.ones([4, 1]), np.zeros([4, 1]), epochs=3, verbose=0)
    w, b, vw, vb = 1.0, 0.0, 0.0, 0.0
    for _ in range(3):
        error = 2 * (w + b)
        vw = 0.9 * vw - 0.1 * (error + 0.5 * w)
        vb = 0.9 * vb - 0.1 * (error + 0.5 * b)
        w, b = w + vw, b + vb
    np.testing.assert_allclose(np.concatenate(model.get_weights(), axis=None), [w, b], rtol=1e-5)

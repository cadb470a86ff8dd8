"""`tfdpx.report` of models that the user's own Keras code trained."""

import json
import shutil

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from sklearn import metrics

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.report import measure, page, verify, words

X, Y = small.data(rows=60)
PLAN = tfdpx.PrivacyPlan(60, batch_size=20, steps=6, noise_multiplier=2.0, delta=1e-3)
FILES = {
    *("model.keras", "record.json", "privacy_statement.txt", "report.html", "model_card.md"),
    *("attack.png", "confusion_matrix.png"),
}


def trained(layers=None, plan=PLAN, **arguments):
    """A model after two updates of a plan."""
    model = small.model(tfdpx.DPSGD(0.1, plan=plan), layers)
    model.fit(X, Y, epochs=3, steps_per_epoch=2, verbose=0, **arguments)
    return model


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture(scope="module")
def report(model, tmp_path_factory):
    """The folder of a report, and what `tfdpx.report` returned."""
    folder = tmp_path_factory.mktemp("reports") / "new" / "first"
    return folder, tfdpx.report(model, folder, data="ward 7, 2024", test=(X, Y))


def test_files_record_and_numbers(model, report):
    folder, view = report
    assert {path.name for path in folder.iterdir()} == FILES
    record = records.read(folder / "record.json")
    assert record == records.read(folder / "model.keras")
    assert record.ledger == model.optimizer.ledger and record.ledger.steps == 6
    assert record.epsilon == view["epsilon"] == PLAN.epsilon
    assert (record.data.name, record.data.num_examples, record.delta) == ("ward 7, 2024", 60, 1e-3)
    right = np.mean(model.predict(X, verbose=0).argmax(axis=1) == Y)
    assert view["test_accuracy"] == pytest.approx(right)
    assert "ward 7, 2024" in (folder / "privacy_statement.txt").read_text()
    shown = (folder / page.FILE).read_text()
    assert "Protected: only each single row of ward 7, 2024" in shown
    assert "Caution: Results and pictures of private test examples are exact" in shown
    assert "the results are not on this card" in (folder / "model_card.md").read_text()
    json.dumps(view, allow_nan=False)


def test_verify_says_yes_and_no_after_tampering(model, report, tmp_path):
    folder, _ = report
    verdict = verify.check(folder)
    assert verdict.sentences()[0].startswith("YES: the 5 files agree") and not verdict.problems
    for name in ("privacy_statement.txt", "report.html", "model_card.md"):
        copy = shutil.copytree(folder, tmp_path / name)
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace("ward 7, 2024", "ward 8, 2024"))
        assert name in " ".join(verify.check(copy).problems)
    copy = shutil.copytree(folder, tmp_path / "model")
    tfdpx.report(model, tmp_path / "another", data="ward 7, 2024")
    shutil.copy(tmp_path / "another" / "model.keras", copy / "model.keras")
    assert "model.keras" in " ".join(verify.check(copy).problems)


def test_the_model_file_is_one_that_was_never_compiled_and_the_model_goes_on(model, report):
    optimizer = model.optimizer
    loaded = keras.saving.load_model(report[0] / "model.keras")
    assert not loaded.compiled and model.compiled and optimizer is not None
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), 1e-6)
    assert set(model.evaluate(X, Y, verbose=0, return_dict=True)) == {"loss"}


def test_a_data_set_measures_as_arrays_do_also_shuffled(model, report, tmp_path):
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(60).batch(7)
    view = tfdpx.report(model, tmp_path / "report", data="ward 7", test=shuffled)
    same = [name for name in view if name.startswith("test_")]
    assert len(same) > 4 and view["num_measured"] == 60
    for name in same:
        assert view[name] == pytest.approx(report[1][name]), name


def test_a_public_part_people_and_lora(tmp_path):
    def layers():
        backbone = keras.Sequential([keras.Input([6]), keras.layers.Dense(8)], name="backbone")
        backbone.set_weights(backbone.get_weights())  # Of unknown origin now.
        backbone.trainable = False
        adapted = keras.layers.Dense(3)
        adapted.build([None, 8])
        adapted.enable_lora(2)
        return [backbone, adapted]

    plan = tfdpx.PrivacyPlan(
        20, batch_size=10, steps=6, noise_multiplier=2.0, delta=1e-3, unit="user"
    )
    with pytest.warns(UserWarning, match="lower bound"):
        model = trained(layers, plan, user_ids=np.arange(60) % 20)
    with pytest.raises(ValueError, match=r"A part .* is unknown.*mark_public") as error:
        tfdpx.report(model, tmp_path / "report", data="visits")
    assert "\n" not in str(error.value) and not (tmp_path / "report").exists()
    tfdpx.checks.mark_public(model)
    view = tfdpx.report(model, tmp_path / "report", data="visits")
    assert view["trained_parameters"] < view["parameters"] and view["steps"] == 6
    assert "test_accuracy" not in view and view["epsilon"] == plan.epsilon
    verdict = verify.check(tmp_path / "report")
    assert not verdict.problems and "for each person" in verdict.sentences()[0]


def test_a_head_on_a_backbone(tmp_path):
    head = tfdpx.heads.LeastSquares(num_classes=3, epsilon=2.0, delta=1e-3).fit(X, Y)
    model = keras.Sequential([keras.Input([6]), head.to_layer()])
    view = tfdpx.report(model, tmp_path / "report", data="ward 7", test=(X, Y))
    assert view["epsilon"] == pytest.approx(2.0, rel=1e-2) and view["delta"] == 1e-3
    assert view["num_examples"] == 60 and view["sampling"] == "full_batch"
    assert view["test_accuracy"] == pytest.approx(head.evaluate(X, Y)["accuracy"])
    assert not verify.check(tmp_path / "report").problems


def outputs_model(activation, units, loss):
    """An untrained model of one layer with weights of a spread."""
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(units, activation)])
    rng = np.random.default_rng(3)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    model.compile("sgd", loss)
    return model


BINARY = (Y == 1).astype("float32")
LOGIT = keras.losses.BinaryCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    "activation, units, loss, labels",
    [
        ("sigmoid", 1, "binary_crossentropy", BINARY),
        (None, 1, LOGIT, BINARY.astype(int)),
        ("softmax", 2, "sparse_categorical_crossentropy", BINARY),
        (None, 2, "mse", np.eye(2)[BINARY.astype(int)]),
    ],
)
def test_logits_and_probabilities_of_two_classes(activation, units, loss, labels):
    model = outputs_model(activation, units, loss)
    outputs = model.predict(X, verbose=0)
    scores = outputs[:, 0] if units == 1 else outputs[:, 1] - outputs[:, 0]
    measured, results = measure.measure_keras(model, (X, labels))
    assert results["test_auc"] == pytest.approx(metrics.roc_auc_score(BINARY, scores))
    right = np.mean((scores > (0.5 if activation == "sigmoid" else 0)) == (BINARY == 1))
    assert results["test_accuracy"] == pytest.approx(right)
    if activation:
        np.testing.assert_allclose(measured.positive, outputs[:, -1], atol=1e-5)


def test_values_and_any_other_model():
    model = outputs_model(None, 1, "mse")
    values = X @ np.arange(6.0)
    _, results = measure.measure_keras(model, (X, values))
    assert results["test_r2"] == pytest.approx(
        metrics.r2_score(values, model.predict(X, verbose=0)[:, 0])
    )
    model = outputs_model(None, 4, "mse")
    many = np.repeat(values[:, None], 4, axis=1)
    measured, results = measure.measure_keras(model, (X, many))
    assert measured is None and results["not_protected"] == words.NOT_PROTECTED
    assert results["test_loss"] == pytest.approx(model.evaluate(X, many, verbose=0), rel=1e-5)
    inputs = keras.Input([6])
    two = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(2)(inputs)])
    two.compile("sgd", "mse", metrics=[["mae"], ["mae"]])
    pairs = tf.data.Dataset.from_tensor_slices((X, (values, many[:, :2]))).batch(16)
    assert measure.measure_keras(two, pairs)[1]["test_loss"] > 0


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"data": " "}, "`data` must be the name"),
        ({"test": X}, r"pair \(x, y\)"),
        ({"folder": "first"}, "must hold no report.*Name a new folder"),
        ({"model": small.model()}, "No private training.*tfdpx.DPSGD"),
    ],
)
def test_refusals(model, report, arguments, text):
    folder = report[0].parent / arguments.pop("folder", "refused")
    with pytest.raises(ValueError, match=text):
        tfdpx.report(**{"model": model, "data": "ward 7", **arguments}, folder=folder)
    assert not (report[0].parent / "refused").exists()


def test_a_delta_is_asked_for_and_a_plan_without_training_gives_it(tmp_path):
    model = small.model()
    model.train_on_batch(X[:16], Y[:16])
    with pytest.raises(ValueError, match="needs a delta.*what was spent stays"):
        tfdpx.report(model, tmp_path, data="ward 7")
    model.compile(tfdpx.DPSGD(0.1, plan=PLAN), "mse")
    view = tfdpx.report(model, tmp_path, data="ward 7")
    assert view["steps"] == 1 and view["seeded"] and not view["releasable"]
    assert "the run had a seed" in " ".join(verify.check(tmp_path).problems)

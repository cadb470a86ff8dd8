"""Attacks on the account: for any use of the API, the ledger is never below the true loss."""

import warnings

import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Ledger

N, B, STEPS = 60, 20, 12
PLAN = tfdpx.PrivacyPlan(N, batch_size=B, steps=STEPS, noise_multiplier=2.0, delta=1e-3)
LOUD = tfdpx.PrivacyPlan(N, batch_size=B, steps=STEPS, noise_multiplier=0.4, delta=1e-3)


def make(plan=PLAN, **arguments):
    return small.model(tfdpx.DPSGD(0.1, plan=plan, momentum=0.9), **arguments)


def built():
    """Returns a model of new weights, built with its optimizer."""
    model = make()
    model.build((None, 6))
    model.optimizer.build(model.trainable_variables)
    return model


def train(model, plan=PLAN, steps=4, **arguments):
    arguments = {"steps_per_epoch": steps, "verbose": 0, **arguments}
    return model.fit(plan.batches(*small.data(N)), **arguments)


def spent(*runs):
    """Returns the oracle: epsilon of (plan, steps) in sequence, by dp_accounting's composition."""
    return accountants.composed_epsilon(
        tuple((p.noise_multiplier, p.sampling_probability, steps) for p, steps in runs), 1e-3
    )


def epsilon(model):
    return model.optimizer.ledger.epsilon(1e-3)


def assign_iterations(model):
    model.optimizer.iterations.assign(0)


def rebuild(model):
    model.optimizer.build(model.trainable_variables)


def test_the_ledger_is_what_was_spent_and_nothing_that_is_assigned_lowers_it():
    model = make()
    assert model.optimizer.ledger.steps == 0
    train(model)
    [entry] = model.optimizer.ledger.entries
    assert (entry.noise_multiplier, entry.sampling_probability, entry.steps) == (2.0, 1 / 3, 4)
    assert entry.poisson_sampled
    assert epsilon(model) == spent((PLAN, 4)) == PLAN.epsilon_at(4)
    steps = 4
    for lower in (assign_iterations, rebuild):
        lower(model)
        assert model.optimizer.ledger.steps == steps
        train(model, steps=3)
        lower(model)
        train(model, steps=1)
        steps += 4
        assert model.optimizer.ledger.steps == steps
    assert epsilon(model) == spent((PLAN, 12))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a model after 4 updates of the plan with little noise; `folder` holds its files."""
    model = make(LOUD)
    train(model, LOUD)
    model.folder = tmp_path_factory.mktemp("trained")
    model.save(model.folder / "model.keras")
    model.save_weights(model.folder / "model.weights.h5")
    return model


def test_a_trained_layer_that_joins_a_model_later_counts(tmp_path):
    model, last = make(), keras.layers.Dense(3)
    train(model)
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), last])
    other.compile(tfdpx.DPSGD(0.1, plan=LOUD), model.loss)
    train(other, LOUD)
    model.add(last)  # Keras keeps the optimizer.
    assert epsilon(model) == pytest.approx(spent((PLAN, 4), (LOUD, 4)))
    model.save(tmp_path / "model.keras")
    assert epsilon(keras.models.load_model(tmp_path / "model.keras")) == epsilon(model)


def test_the_updates_of_a_file_count_in_the_budget(trained):
    quiet = built()
    quiet.load_weights(trained.folder / "model.keras")
    assert epsilon(quiet) == spent((LOUD, 4))
    with pytest.raises(tfdpx.callbacks.BudgetExceeded, match="used up: 0 of 12 .*the plan's is"):
        train(quiet)
    before = quiet.optimizer.ledger
    plan = tfdpx.PrivacyPlan(N, B, 3, noise_multiplier=2.0, delta=1e-3, spent=before)
    quiet.compile(tfdpx.DPSGD(0.1, plan=plan), loss=quiet.loss)
    train(quiet, plan, steps=3)
    assert epsilon(quiet) == pytest.approx(spent((LOUD, 4), (PLAN, 3)), rel=1e-6) == plan.epsilon
    with pytest.raises(tfdpx.callbacks.BudgetExceeded, match="used up: 3 of 3"):
        train(quiet, plan)


def test_a_file_written_within_an_epoch_carries_the_ledger(tmp_path):
    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                tf.train.Checkpoint(optimizer=self.model.optimizer).save(str(tmp_path / "c"))

    train(make(), callbacks=[Save()])
    other = make()
    tf.train.Checkpoint(optimizer=other.optimizer).restore(tf.train.latest_checkpoint(tmp_path))
    assert other.optimizer.ledger.steps == 3


@pytest.mark.slow
def test_files_of_one_run_count_once_and_of_two_runs_twice(tmp_path, trained):
    model = make()
    for i in range(2):
        train(model)
        model.save_weights(tmp_path / f"{i}.weights.h5")
    other = built()
    loud = trained.folder / "model.weights.h5"
    for path, steps in (("0", 4), ("1", 8), ("0", 8), (loud, 12)):
        path = path if path is loud else tmp_path / f"{path}.weights.h5"
        other.load_weights(path)
        assert other.optimizer.ledger.steps == steps
    model.load_weights(tmp_path / "0.weights.h5")  # An earlier file of the run lowers nothing.
    assert model.optimizer.ledger.steps == 8
    train(model, steps=2)
    assert model.optimizer.ledger.steps == 10


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_a_ledger_is_read_even_where_the_rest_of_the_optimizer_does_not_fit(trained):
    other = make()
    other.compile(tfdpx.DPAdam(0.1, plan=PLAN), loss=other.loss)
    other.build((None, 6))
    other.load_weights(trained.folder / "model.weights.h5")
    assert other.optimizer.ledger.steps == 4


@pytest.mark.parametrize("damage", ["cut", "of 0.2"])
@pytest.mark.parametrize("name", ["model.weights.h5", "checkpoint"])
def test_a_file_whose_ledger_cannot_be_read_changes_no_weight(name, damage, tmp_path, monkeypatch):
    old = built()
    if damage == "cut":
        monkeypatch.setattr(Ledger, "to_json", lambda self: '{"format": "tfdpx.Ledger/8"')
    elif name == "checkpoint":
        old.optimizer._ledger_facts = tf.Variable(np.zeros([64, 5]))
        del old.optimizer._saved_ledger
    else:
        arrays = {"ledger_facts": np.zeros([64, 5]), "ledger_steps": np.zeros(64, "int64")}
        monkeypatch.setattr(old.optimizer.account, "arrays", lambda: arrays)
    file = tmp_path / name
    if name == "checkpoint":
        file = tf.train.Checkpoint(model=old, optimizer=old.optimizer).save(str(file))
    else:
        old.save_weights(file)
    monkeypatch.undo()
    model = built()
    before = small.weights(model)
    with pytest.raises(ValueError, match="not a whole ledger|of version 0.2, which"):
        if name == "checkpoint":
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(file)
        else:
            model.load_weights(file)
    np.testing.assert_array_equal(before, small.weights(model))
    assert model.optimizer.ledger.is_complete and not model.optimizer.ledger.entries


def test_the_settings_that_the_account_counts_on_are_read_only():
    optimizer = make().optimizer
    for name in ("noise_multiplier", "batch_size", "l2_norm_clip", "augmult", "seed", "plan",
                 "microbatch_size", "augment", "public_validation"):  # fmt: skip
        with pytest.raises(AttributeError, match=f"`{name}` of a private optimizer is read-only"):
            setattr(optimizer, name, 5.0)
    assert optimizer.noise_multiplier == 2.0


@pytest.mark.slow
def test_updates_that_a_plan_does_not_know_compose_up_to_its_epsilon():
    plan = tfdpx.PrivacyPlan(N, batch_size=B, steps=40, noise_multiplier=2.0, delta=1e-3)
    before = tfdpx.PrivacyPlan(N, batch_size=B, steps=3, noise_multiplier=3.0, delta=1e-3)
    model = make(before)
    train(model, before, steps=3)
    model.compile(tfdpx.DPSGD(0.1, plan=plan), loss=model.loss)
    with pytest.warns(UserWarning, match="3 updates of the model's weights are not this plan's"):
        history = train(model, plan, None, callbacks=[tfdpx.callbacks.PrivacyBudget(plan)]).history
    taken = model.optimizer.ledger.of(plan).steps
    assert 30 < taken < 40
    wanted = spent((before, 3), (plan, taken))
    assert history["epsilon"][-1] == pytest.approx(wanted, rel=1e-9)
    assert wanted <= plan.epsilon
    assert spent((before, 3), (plan, taken + 1)) > plan.epsilon


def test_weights_of_a_file_that_are_frozen_by_now_may_have_trained(tmp_path, trained):
    trained.layers[0].trainable = False
    trained.save(tmp_path / "model.keras")
    trained.layers[0].trainable = True
    features = keras.saving.load_model(tmp_path / "model.keras").layers[0]
    assert not features.trainable
    other = keras.Sequential([keras.Input((6,)), features, keras.layers.Dense(3)])
    other.compile(tfdpx.DPSGD(0.1, plan=PLAN), loss=trained.loss)
    assert other.optimizer.ledger.steps == 4


def test_quantized_weights_keep_the_ledger():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, use_bias=False)])
    model.compile(tfdpx.DPSGD(0.1, plan=PLAN), loss=make().loss, run_eagerly=True)
    train(model, steps=1)
    model.quantize("int8")
    other = keras.Sequential([model.layers[0], keras.layers.Dense(3)])
    other.compile(tfdpx.DPSGD(0.1, plan=PLAN), loss=model.loss)
    assert other.optimizer.ledger.steps == 1


def test_models_that_share_frozen_weights_alone_share_no_account():
    """For example, a grid search over heads on a public backbone."""
    backbone = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
    backbone.trainable = False
    for _ in range(2):
        model = keras.Sequential([backbone, keras.layers.Dense(3)])
        model.compile(tfdpx.DPSGD(0.1, plan=PLAN), loss=make().loss, run_eagerly=True)
        train(model)
        assert model.optimizer.ledger.steps == 4


# Attacks on the account that once succeeded.


@pytest.mark.slow
def test_sample_weights_do_not_hide_the_size_of_a_batch():
    x, y = small.data(N)
    plan = tfdpx.PrivacyPlan(N, batch_size=2, steps=9, noise_multiplier=2.0, delta=1e-3)
    model = small.model(tfdpx.DPSGD(0.1, plan=plan))
    model.train_on_batch(x, y, (np.arange(N) < 2).astype("float32"))
    before = small.weights(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="batch is too large"):
        model.train_on_batch(x, y, np.ones(N, "float32"))
    np.testing.assert_array_equal(small.weights(model), before)
    # XLA has no errors, so the update is only noise.
    model.compile(tfdpx.DPSGD(0.1, plan=plan), model.loss, jit_compile=True)
    moved = small.step(model, x, y, np.ones(N, "float32"))
    assert np.std(moved) == pytest.approx(0.1 * 2.0 / 2, rel=0.5)


def test_the_delta_of_a_plan_pays_for_other_mechanisms_in_its_logs_too():
    about = {"unit": "example", "neighbours": "add_or_remove", "name": "counts"}
    release = Ledger().with_release(epsilon=0.5, delta=5e-4, **about)
    budget = {"noise_multiplier": 2.0, "delta": 1e-3, "spent": release}
    plan = tfdpx.PrivacyPlan(N, batch_size=B, steps=3, **budget)
    history = train(make(plan), plan)
    assert history.history["epsilon"] == [plan.epsilon]
    budget = tfdpx.callbacks.PrivacyBudget(plan)  # The optimizer's plan has no `spent`.
    assert train(make(), PLAN, callbacks=[budget]).history["epsilon"] == [plan.epsilon]


def test_a_plan_for_right_guesses_has_no_room_for_updates_without_a_bound():
    model = make()
    model.train_on_batch(*small.data(B))
    plan = tfdpx.PrivacyPlan(N, B, 5, right_guesses=0.7, delta=1e-3)
    model.compile(tfdpx.DPSGD(0.1, plan=plan), model.loss)
    with pytest.raises(tfdpx.callbacks.BudgetExceeded, match="0 of 5 steps"):
        train(model, plan)


@pytest.mark.parametrize("how", ["copy", "checkpoint", "release"])
def test_spending_on_the_weights_within_an_epoch_shortens_the_plan(how, tmp_path):
    source, individual = make(), tfdpx.accounting.IndividualAccountant(PLAN, rounding=0.5)
    train(source, steps=8)
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN, individual=individual))

    def spend(batch, logs):
        if batch != 1:
            return
        if how == "copy":
            tfdpx.copy_weights(source, model)
        elif how == "checkpoint":
            path = tf.train.Checkpoint(optimizer=source.optimizer).save(str(tmp_path / "saved"))
            tf.train.Checkpoint(optimizer=model.optimizer).restore(path)
        else:
            individual.release(noise_multiplier=12.0, steps=2)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=spend)
    train(model, steps=STEPS, callbacks=[callback])
    assert epsilon(model) <= PLAN.epsilon
    assert model.optimizer.account._state.updates < STEPS


@pytest.mark.slow
def test_a_saved_model_inside_another_is_of_unknown_origin(trained, tmp_path):
    trained.export(tmp_path / "exported", verbose=False)
    layer = keras.layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve")
    inputs = keras.Input([6])
    model = keras.Model(inputs, keras.layers.Dense(3)(layer(inputs)))
    model.compile(tfdpx.DPSGD(0.1, plan=PLAN), trained.loss)
    assert not model.optimizer.ledger.is_complete
    tfdpx.checks.mark_public(model)
    assert model.optimizer.ledger.is_complete


def adapted(noise=20.0):
    layer = keras.layers.Normalization()
    ledger = tfdpx.private_adapt(layer, small.data(N)[0], noise_multiplier=noise, lower=-3, upper=3)
    return layer, ledger


@pytest.mark.slow
def test_noisy_statistics_are_counted_in_the_next_process_too(tmp_path):
    layer, ledger = adapted()
    model = keras.Sequential([keras.Input([6]), layer, keras.layers.Dense(3)])
    plan = tfdpx.PrivacyPlan(N, B, 6, noise_multiplier=2.0, delta=1e-3, spent=ledger)
    model.compile(tfdpx.DPSGD(0.1, plan=plan), make().loss)
    train(model, plan)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    train(loaded, plan, steps=2)
    assert loaded.optimizer.ledger.steps == 6 + ledger.steps
    assert epsilon(loaded) == pytest.approx(plan.epsilon)


def test_other_statistics_do_not_pass_for_noisy_ones_through_a_file(tmp_path):
    """A file of weights holds no vocabulary, so a layer of the same name may have another one."""
    words, labels = np.array(["red", "blue"] * 200), np.zeros(N)

    def holding(adapt):
        layer = keras.layers.StringLookup(output_mode="multi_hot", name="words")
        adapt(layer)
        text = keras.Input([1], dtype="string")
        model = keras.Model(text, keras.layers.Dense(3)(layer(text)))
        model.compile(tfdpx.DPSGD(0.1, plan=PLAN), make().loss, run_eagerly=True)
        return model

    def fit(model):
        model.fit(PLAN.batches(words[:N, np.newaxis], labels), steps_per_epoch=1, verbose=0)

    noisy = holding(lambda layer: tfdpx.private_adapt(layer, words, noise_multiplier=2.0))
    fit(noisy)
    noisy.save_weights(tmp_path / "m.weights.h5")
    other = holding(lambda layer: layer.adapt(np.array(["red", "green"] * 20)))
    other.load_weights(tmp_path / "m.weights.h5")
    with pytest.raises(tfdpx.checks.UnfitForPrivacy, match="was adapted to data"):
        fit(other)


@pytest.mark.slow
def test_noisy_statistics_that_nothing_counts_are_named():
    layer, ledger = adapted()
    plan = tfdpx.PrivacyPlan(N, B, 6, noise_multiplier=2.0, delta=1e-3, spent=ledger)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make(plan), plan)
    layer, _ = adapted()
    with pytest.warns(UserWarning, match=f"'{layer.name}' was adapted.*spent=ledger"):
        train(make())

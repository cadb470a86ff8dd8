"""Individual clips: each example is charged for its true clip, in every way to run the step."""

import individual_replay as replay
import keras
import numpy as np
import processes
import pytest
import tensorflow as tf

import tfdpx
from tfdpx import mechanism
from tfdpx.accounting import IndividualAccountant
from tfdpx.training.clipping import IndividualClip


@pytest.mark.parametrize("class_weight", [None, {0: 4.0, 1: 0.5}])
def test_each_example_is_clipped_at_what_it_is_charged_for(class_weight):
    plan = replay.make_plan()
    accountant = IndividualAccountant(plan, rounding=0.07)
    replay.check(plan, accountant, views=2, microbatch_size=6, class_weight=class_weight)


def clip_at_one(self, ids, count):
    return tf.ones([count])


def clip_of_neighbour(self, ids, count, original=IndividualClip.clips):
    return original(self, None if ids is None else (ids + 1) % replay.COUNT, count)


def factors_of_plain_clip(norms, clip, size, *_, f=mechanism.clip_factors):
    return f(norms, clip, size)


def factors_not_scaled(norms, clip, size, fractions=1.0, f=mechanism.clip_factors):
    return f(norms, clip, size, fractions) / fractions


def weight_alone(self, clips, weights):
    return tf.ones_like(clips)


def charge_what_comes_next(self, ids, present, norms, original=IndividualClip._store_norms):
    original(self, ids, present, norms, tf.convert_to_tensor(self._variables["steps"]))
    self._variables["steps"].assign_add(1)


def forget_padding(self, ids, present, norms, upto, original=IndividualClip._store_norms):
    original(self, ids, tf.ones_like(present), tf.maximum(norms, 0.0), upto)


BUGS = [
    (IndividualClip, "clips", clip_at_one),
    (IndividualClip, "clips", clip_of_neighbour),
    (mechanism, "clip_factors", factors_of_plain_clip),
    (mechanism, "clip_factors", factors_not_scaled),
    (IndividualClip, "before_weights", weight_alone),
    (IndividualClip, "count_update", charge_what_comes_next),
    (IndividualClip, "_store_norms", forget_padding),
]


@pytest.mark.planted("another clip than the accounted one")
@pytest.mark.parametrize(
    "owner, name, bug",
    BUGS,
    ids=[bug.__name__ for *_, bug in BUGS],
)
def test_a_clip_that_is_not_the_accounted_one_is_found(monkeypatch, owner, name, bug):
    monkeypatch.setattr(owner, name, bug)
    plan = replay.make_plan()
    with pytest.raises(AssertionError):
        accountant = IndividualAccountant(plan, rounding=0.07)
        replay.check(plan, accountant, class_weight={0: 4.0, 1: 0.5})


@pytest.mark.parametrize("weight", [None, 0.9, 0.35])
def test_one_example_moves_an_update_by_its_own_clip(weight):
    plan = replay.make_plan(batch_size=replay.COUNT, steps=1)
    x, y = replay.data()
    level = 1 + np.arange(replay.COUNT) % 10
    kernels = []
    for present in (np.ones(replay.COUNT), np.arange(replay.COUNT) != 17):
        accountant = IndividualAccountant(plan, rounding=0.1)
        model = replay.make_model(plan, accountant)
        accountant._record._variables["levels"].assign(np.append(level, 10))
        batches = plan.batches(
            50 * x, y, present.astype(float), class_weight=weight and {y[17]: weight},
            optimizer=model.optimizer, seed=replay.SEED,
        )  # fmt: skip
        model.fit(batches, verbose=0)
        kernels.append(model.weights[0].numpy())
    change = np.linalg.norm(kernels[0] - kernels[1]) * plan.batch_size / replay.RATE
    charged = accountant.fractions[level[17] - 1]
    assert change == pytest.approx(min(charged, weight or 1.0), rel=1e-4)


def test_a_gradient_that_is_not_finite_is_charged_in_full():
    plan = replay.make_plan(batch_size=replay.COUNT, steps=3)
    accountant = IndividualAccountant(plan)
    x, y = replay.data()
    x[7] = np.inf
    replay.train(plan, accountant, xy=(x, y))
    assert accountant.norms()[7] == 1 and (accountant.norms() < 1).sum() > 20


@pytest.mark.slow
def test_refreshed_norms_are_those_of_all_examples():
    plan = replay.make_plan(batch_size=20)
    accountant = IndividualAccountant(plan, refreshes_per_epoch=1)
    model, _ = replay.train(plan, accountant, class_weight={0: 4.0, 1: 3.0})
    x, y = replay.data()
    gradients = replay.gradients(x, y, model.weights[0].numpy())
    norms = np.minimum(np.sqrt((gradients**2).sum((1, 2))) / replay.CLIP, 1)
    norms *= np.array([1.0, 0.75, 0.25])[y]
    charged = accountant.norms()
    assert ((charged >= norms - 1e-6) & (charged <= norms + accountant.rounding + 1e-6)).all()
    assert accountant._record.counts().sum(axis=1).tolist() == replay.COUNT * [plan.steps]


def saved_run(folder, accountant, epochs):
    """Resumes a training with a seed from a folder; returns the final kernel."""
    plan = replay.make_plan()
    model = replay.make_model(plan, accountant)
    model.fit(
        plan.batches(*replay.data()), epochs=epochs, steps_per_epoch=2, verbose=0,
        callbacks=[tfdpx.callbacks.Checkpoint(folder)],
    )  # fmt: skip
    return model.weights[0].numpy()


@pytest.mark.slow
def test_a_resumed_run_has_the_same_account(tmp_path):
    def accountant():
        return IndividualAccountant(replay.make_plan(), refreshes_per_epoch=1)

    unbroken, first, resumed = (accountant() for _ in range(3))
    wanted = saved_run(tmp_path / "whole", unbroken, epochs=4)
    saved_run(tmp_path / "parts", first, epochs=2)
    kernel = saved_run(tmp_path / "parts", resumed, epochs=4)
    np.testing.assert_array_equal(kernel, wanted)
    np.testing.assert_array_equal(resumed.epsilon(), unbroken.epsilon())
    assert (first.epsilon() < resumed.epsilon()).any()


def test_batches_without_ids_are_refused():
    plan, (x, y) = replay.make_plan(), replay.data()
    model = replay.make_model(plan, IndividualAccountant(plan))
    batches = plan.batches(x, y)
    batch = tf.constant(x[:15]), tf.constant(y[:15])
    for call, message in (
        (lambda: model.fit(batches.take(2), verbose=0), "which example is which"),
        (lambda: model.train_on_batch(*batch), "without ids"),
        (lambda: model.train_step(batch), "without ids"),
        (lambda: model.train_step((*batch, tf.ones(15), tf.zeros(15, "int32"))), "without ids"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert model.optimizer.ledger.steps == 0
    model.fit(batches, steps_per_epoch=2, epochs=1, verbose=0)
    with pytest.raises(ValueError, match="in another order"):
        model.fit(plan.batches(x[::-1], y[::-1]), verbose=0)


def test_an_accountant_follows_one_optimizer_of_its_plan():
    plan = replay.make_plan()
    accountant = IndividualAccountant(plan)
    with pytest.raises(ValueError, match="has tracked no training"):
        accountant.epsilon()
    arguments = {"plan": plan, "individual": accountant}
    without_plan = {"plan": None, "batch_size": 15, "noise_multiplier": 1.0}
    for changes, message in (
        ({"plan": replay.make_plan(steps=9)}, "`individual` accounts for another plan"),
        (without_plan, "`individual` accounts for another plan"),
        ({"l2_norm_clip": 1e-8}, "`l2_norm_clip` is too small"),
        ({"individual": True}, "must be a tfdpx.accounting.IndividualAccountant"),
    ):
        with pytest.raises(ValueError, match=message):
            tfdpx.DPSGD(1.0, **{**arguments, **changes})
    tfdpx.DPSGD(1.0, **arguments)
    for name in ("plan", "rounding", "refreshes_per_epoch", "conversion"):
        with pytest.raises(AttributeError):
            setattr(accountant, name, getattr(accountant, name))
    with pytest.raises(ValueError, match="accountant of another optimizer"):
        tfdpx.DPSGD(1.0, **arguments)


@pytest.mark.slow
def test_a_loaded_model_has_no_norms_and_counts_what_was_spent_in_full(tmp_path):
    plan = replay.make_plan()
    model, _ = replay.train(plan, IndividualAccountant(plan, rounding=0.05))
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    accountant = loaded.optimizer.individual
    assert accountant.rounding == 0.05 and (accountant.norms() == 1).all()
    np.testing.assert_allclose(accountant.epsilon(), plan.epsilon)
    names = " ".join(v.path for v in (*model.optimizer.variables, *model.variables))
    shapes = [tuple(v.shape) for v in model.optimizer.variables]
    assert "levels" not in names and all(replay.COUNT + 1 not in shape for shape in shapes)


@pytest.mark.nightly
def test_individual_and_adaptive_clips_on_two_devices():
    processes.run_alone(
        "individual_replica_cases.replicas_agree", "replica_cases.adaptive_updates_agree"
    )

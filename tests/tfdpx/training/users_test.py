"""Training on people: against a loop over them, by leaving one out, and refusals."""

import pathlib
import re
import types

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx.sampling.users import numbered
from tfdpx.training.views import Views

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "users.md"
PEOPLE, MOST, CLIP = 9, 5, 0.3
RNG = np.random.default_rng(3)
IDS = RNG.permutation(np.repeat(np.arange(PEOPLE), 1 + np.arange(PEOPLE) % MOST))
X, Y = small.data(len(IDS))
UNKNOWN = ("N/A", "#n/a", "<NA>", "unknown", "(Unknown)", "?", "-", "\u2014", "...", "-1", b"n.a.")
pytestmark = pytest.mark.filterwarnings("ignore:`noise_multiplier=0`", "ignore:The optimizer is ma")


def make_plan(batch_size=PEOPLE, steps=1, noise_multiplier=0.0, **arguments):
    return tfdpx.PrivacyPlan(
        PEOPLE, batch_size, steps, noise_multiplier, delta=1e-3, unit="user", **arguments
    )


def make_model(plan=None, layers=None, compile_arguments=None, **arguments):
    arguments = {"plan": plan or make_plan(), "l2_norm_clip": CLIP, **arguments}
    optimizer = tfdpx.DPSGD(1.0, **arguments)
    model = small.model(optimizer, layers, compile_arguments=compile_arguments)
    model.build((None, *X.shape[1:]))
    return model


def update(model, weights=None, k=MOST, x=X, y=Y, ids=IDS, class_weight=None):
    """Returns the change of the weights by one update on all people; the weights are restored."""
    before = [variable.numpy() for variable in model.trainable_variables]
    arguments = dict(user_ids=ids, examples_per_user=k, steps_per_epoch=1, verbose=0)
    model.fit(x, y, sample_weight=weights, class_weight=class_weight, **arguments)
    after = small.weights(model)
    for variable, value in zip(model.trainable_variables, before, strict=True):
        variable.assign(value)
    return after - small.weights(model)


@pytest.fixture(scope="module", name="model")
def _model():
    """A model for many updates on all people."""
    return make_model(make_plan(steps=100), microbatch_size=4)


def by_a_loop(model, weights=None):
    """Computes `update` person by person: the mean gradient of their examples, clipped."""
    total, clip = 0.0, model.optimizer.l2_norm_clip
    weights = np.ones(len(IDS), "float32") if weights is None else weights
    gradients = batch_of_one_gradients(model, *map(tf.constant, (X, Y, weights)), 1)
    for person in range(PEOPLE):
        rows = (IDS == person) & (weights > 0)
        if rows.any():
            mean = gradients[rows].mean(axis=0)
            total += mean * min(1, clip / np.linalg.norm(mean))
    return -total / clip / PEOPLE


@pytest.mark.parametrize("k", [MOST, slow(MOST + 2)])
def test_an_update_is_the_sum_of_clipped_means_of_people(model, k):
    np.testing.assert_allclose(update(model, k=k), by_a_loop(model), rtol=1e-4, atol=1e-6)


def test_means_and_not_sums_are_clipped():  # Above the clip, both have one direction.
    model = make_model(l2_norm_clip=5.0)
    wanted = by_a_loop(model)
    np.testing.assert_allclose(update(model), wanted, rtol=1e-4, atol=1e-6)


def test_examples_have_weights_of_their_own(model):
    weights = RNG.uniform(0.5, 3, len(IDS)).astype("float32")
    weights[RNG.permutation(len(IDS))[:6]] = 0.0
    weights[IDS == 3] = 0.0  # One person has no example left.
    x = np.where(weights[:, np.newaxis] == 0, np.float32("nan"), X)  # Absent rows are not read.
    wanted = by_a_loop(model, weights)
    np.testing.assert_allclose(update(model, weights, x=x), wanted, rtol=1e-4, atol=1e-6)
    wanted = by_a_loop(model, weights * np.array([1.0, 0.0, 4.0], "float32")[Y])
    changed = update(model, weights, x=x, class_weight={1: 0.0, 2: 4.0})
    np.testing.assert_allclose(changed, wanted, rtol=1e-4, atol=1e-6)


def over_all_rows(self, values):  # Without the mask a person's first example counts again.
    return self.repeat(tf.ones_like(values, "float32") / values.shape[1])


@pytest.mark.planted("a person's mean counts padding")
def test_the_loop_rejects_a_mean_that_counts_padding(monkeypatch):
    monkeypatch.setattr(Views, "row_weights", over_all_rows)
    model = make_model()
    wanted = by_a_loop(model)
    assert np.abs(update(model) - wanted).max() > 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize("longest", [1e4, float("nan")])
def test_leaving_out_a_person_moves_the_update_by_at_most_one_clip(model, longest):
    person = PEOPLE - 1
    x, weights = X.copy(), np.ones(len(IDS), "float32")
    x[IDS == person] *= np.float32(longest)
    changed = update(model, weights, x=x)
    weights[IDS == person] = 0.0
    moved = np.linalg.norm(changed - update(model, weights, x=x)) * PEOPLE
    assert moved <= 1 + 1e-5 and (moved > 0.99 or np.isnan(longest) and moved == 0)


def batches(ids=IDS, k=2, steps=200, seed=None, x=None, **arguments):
    x = np.arange(len(ids)) if x is None else x
    plan = make_plan(4, steps, 1.0)
    data = plan.batches(x, user_ids=ids, examples_per_user=k, seed=seed, **arguments)
    return [(x.numpy(), w.numpy() > 0) for x, _, w in data]


@pytest.mark.slow
def test_people_are_drawn_by_the_plan_and_give_k_examples_without_repetition_each_as_often():
    times, steps, people = np.zeros(len(IDS)), 600, []
    for rows, present in batches(k=2, steps=steps, seed=1):
        people.append(present.any(axis=1).sum())
        for person_rows, there in zip(rows, present, strict=True):
            numbers = person_rows[there]
            assert len(set(numbers)) == len(numbers) and len(set(IDS[numbers])) <= 1
            if len(numbers):
                assert len(numbers) == min(2, np.sum(IDS == IDS[numbers[0]]))
                times[numbers] += 1
    for person in range(PEOPLE):
        counts, count = times[IDS == person], np.sum(IDS == person)
        wanted = steps * 4 / PEOPLE * min(2, count) / count
        assert np.all(np.abs(counts - wanted) < 5 * np.sqrt(wanted))
    assert abs(np.mean(people) - 4) < 5 * np.sqrt(4 / steps)


def test_ids_that_would_protect_somebody_less_are_refused(model):
    for ids, message in (
        (IDS[:-1], "an id per example"),
        (IDS.astype("float32"), "ints, or strings"),
        ([None, *IDS[1:]], "None"),
        ([float("nan"), *IDS[1:]], "nan"),
        (["", *map(str, IDS[1:])], "''"),
        (["1", *IDS[1:].tolist()], r"\['int', 'str'\]"),
        ([True, *IDS[1:]], "True"),
        ([-1, *IDS[1:]], "the id -1"),
        (np.append(-(2**63), IDS[1:]), "the id -9223372036854775808"),
        (np.array(["b", float("nan"), *map(str, IDS[2:])]), "the id 'nan'"),
        (np.ma.masked_equal(IDS, 3), "'NoneType'"),
        (np.append(2**32 - 1, IDS[1:]), "the id 4294967295"),
        (["NULL", *map(str, IDS[1:])], "the id 'NULL'"),
        *(([name, *map(str, IDS[1:])], re.escape(f"the id {name!r}")) for name in UNKNOWN),
        (["1 ", *map(str, IDS[1:])], "'1 ' and '1'|'1' and '1 '"),
        (["\ufeffa b", "a\t b", *map(str, IDS[2:])], "in one way"),  # As on a file's first line.
        (["\u00e9", "e\u0301", *map(str, IDS[2:])], "in one way"),
        (["\u00e9", "e\u200d\u0301", *map(str, IDS[2:])], "in one way"),
        (["\u0390", "\u03aa\u0301", *map(str, IDS[2:])], "in one way"),  # In upper case.
        (["P1", "p1", *map(str, IDS[2:])], "in one way"),
        (iter(IDS), "an id per example"),
        (tf.sparse.from_dense(IDS), "an id per example"),
        (np.zeros(len(IDS), int), "1 people"),
        (None, "draws people"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(X, Y, user_ids=ids, verbose=0)


def test_ids_with_signs_are_ids():
    names = ["-2", "a-", "?1", "nana", "unknown7", "\U0001f431", "\u0430", "0", "n/a/1"]
    assert numbered(names, len(names))[1] == len(names)


class Indexed(np.ndarray):
    """A stand-in for a pandas object: pandas is not installed here."""

    index = None


def indexed(values, order):
    array, index = np.asarray(values).view(Indexed), types.SimpleNamespace(order=order)
    index.equals = lambda other: other.order == order
    array.index = index
    return array


def test_ids_in_another_order_than_the_examples_are_refused():
    plan = make_plan(4, 3, 1.0)
    with pytest.raises(ValueError, match="a tf.data.Dataset may shuffle"):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100)
        plan.batches(data, user_ids=IDS)
    for x, y in ((indexed(X, "b"), Y), (X, indexed(Y, "b")), (indexed(X, "a"), indexed(Y, "b"))):
        with pytest.raises(ValueError, match="`user_ids.loc"):
            plan.batches(x, y, user_ids=indexed(IDS, "a"))
    for x, ids in ((indexed(X, "a"), indexed(IDS, "a")), (X, indexed(IDS, "a")), (X, list(IDS))):
        plan.batches(x, Y, user_ids=ids)


def test_options_that_do_not_go_together_are_refused(model):
    rows, plan = tfdpx.PrivacyPlan(len(IDS), 8, 4, 1.0, delta=1e-3), make_plan(4, 3, 1.0)
    drawn = make_plan(noise_multiplier=1.0).batches(X, Y, user_ids=IDS)
    of_rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(PEOPLE)
    accountant, other = tfdpx.accounting.IndividualAccountant(plan), small.model
    arguments = {"user_ids": IDS, "verbose": 0}
    for call, message in (
        (lambda: make_model(rows).fit(X, Y, **arguments), "`user_ids` needs a plan of people"),
        (lambda: rows.batches(X, Y, examples_per_user=2), "`examples_per_user`"),
        (lambda: model.fit(X, Y, validation_split=0.5, **arguments), "other people"),
        (lambda: model.train_on_batch(X, Y), "the person of each example"),
        (lambda: model.fit(of_rows, verbose=0), "the person of each example"),
        (lambda: model.train_step((X, Y, np.ones(len(X), "float32"))), "that it drew.*shapes"),
        (lambda: other(batch_size=PEOPLE).fit(drawn, verbose=0), "plan=None"),
        (lambda: model.fit(drawn, **arguments), "cannot change batches"),
        (lambda: make_plan(sampling="shuffle"), '"poisson"'),
        (lambda: tfdpx.DPSGD(plan=plan, individual=accountant), "`individual`"),
        (lambda: other(keras.optimizers.SGD()).fit(X, Y, **arguments), "user_ids"),
        (
            lambda: make_model(plan).fit(X, Y, validation_data=(X[:4], Y[:4]), **arguments),
            "must hold other examples",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.slow
def test_ledger_and_files_say_whom_epsilon_protects(tmp_path):
    plan = make_plan(4, 6, 1.5)
    model = make_model(plan)
    model.fit(X, Y, user_ids=IDS, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for ledger in (model.optimizer.ledger, loaded.optimizer.ledger):
        assert ledger.unit == "user" and ledger.of(plan).steps == ledger.steps == 6
        assert "all examples of one person" in " ".join(ledger.statement(1e-3).split())
    assert loaded.optimizer.plan == plan


@pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")
@pytest.mark.slow
def test_the_code_of_the_page(capsys):
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, PAGE.name, "exec"), {})
    unit, epsilon = capsys.readouterr().out.split()
    assert unit == "user" and 2.9 < float(epsilon) <= 3

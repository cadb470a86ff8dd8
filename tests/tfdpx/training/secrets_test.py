"""Attacks on the secrets: they are in no file or message, and no noise is used twice."""

import functools
import logging
import pickle
import secrets
import zipfile

import copies
import h5py
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow

import tfdpx
from tfdpx import noise
from tfdpx.training import session

PLAN = tfdpx.PrivacyPlan(60, batch_size=20, steps=30, noise_multiplier=1.0, delta=1e-3)
X, Y = small.data(60)


def make(seed=None):
    model = small.model(tfdpx.DPSGD(1.0, plan=PLAN, seed=seed, use_ema=True))
    model.build((None, 6))
    return model


class SecretWords(set):
    """The 64-bit words of all secrets of this process, as ints."""

    def traces(self):
        """Returns every way to write them down: as numbers, in hexadecimal, as bytes."""
        for word in self:
            yield str(word).encode()
            yield str(word & (2**64 - 1)).encode()
            yield f"{word & (2**64 - 1):016x}".encode()
            for order in ("little", "big"):
                yield (word & (2**64 - 1)).to_bytes(8, order)

    def are_in(self, content):
        return any(trace in content for trace in self.traces())


@pytest.fixture
def secret_words(monkeypatch):
    words = SecretWords()
    of, randbits = session.secret_of, secrets.randbits

    def spy_of(*arguments):
        value = of(*arguments)
        words.update(value)
        return value

    def spy_bits(count):
        value = randbits(count)
        if count == 128:
            words.update(divmod(value, 2**64))
        return value

    monkeypatch.setattr(session, "secret_of", spy_of)
    monkeypatch.setattr(secrets, "randbits", spy_bits)
    return words


@pytest.mark.slow
def test_every_training_takes_128_bits_of_the_operating_system(secret_words):
    model, counts = make(), []
    for _ in range(2):
        model.fit(PLAN.batches(X, Y), steps_per_epoch=1, verbose=0)
        counts.append(len(secret_words))
    assert 0 < counts[0] < counts[1] and max(word.bit_length() for word in secret_words) >= 60
    assert len(set(map(tuple, (noise.make_seed() for _ in range(100))))) == 100


def content(path):
    """Returns all bytes of a file, or of a folder's files, with compressed members unpacked."""
    if path.is_dir():
        return b"".join(content(inner) for inner in path.iterdir())
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return b"".join(archive.read(name) for name in archive.namelist())
    return path.read_bytes()


WRITE = {
    "keras": lambda model, folder: model.save(folder / "m.keras"),
    "weights": lambda model, folder: model.save_weights(folder / "m.weights.h5"),
    "tf.train.Checkpoint": lambda model, folder: tf.train.Checkpoint(
        model=model, optimizer=model.optimizer
    ).save(str(folder / "c")),
    "export": lambda model, folder: model.export(str(folder / "e"), verbose=False),
    "json": lambda model, folder: (folder / "m.json").write_text(model.to_json()),
    "pickle": lambda model, folder: (folder / "m.pickle").write_bytes(pickle.dumps(model)),
    "Checkpoint": lambda model, folder: model.fit(
        PLAN.batches(X, Y), steps_per_epoch=1, verbose=0,
        callbacks=[tfdpx.callbacks.Checkpoint(folder)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", [123_456_789_123, slow(None)])
def test_no_file_holds_a_seed(seed, secret_words, tmp_path):
    model = make(seed)
    model.fit(PLAN.batches(X, Y), steps_per_epoch=2, verbose=0)
    for kind, write in WRITE.items():
        folder = tmp_path / kind
        folder.mkdir()
        write(model, folder)
        stored = content(folder)
        assert len(stored) > 100 and secret_words, kind
        assert not secret_words.are_in(stored), kind
        assert str(seed).encode() not in stored, kind
    (tmp_path / "f").write_bytes(np.array(noise.make_seed()).tobytes())
    (tmp_path / "g").write_bytes(np.array(session.secret_of(seed, "step")).tobytes())
    assert secret_words.are_in(content(tmp_path))  # The search can find a secret.


@pytest.mark.slow
def test_nothing_that_a_training_says_tells_a_secret(
    secret_words, tmp_path, capsys, caplog, recwarn
):
    """Searches all that it prints, logs, warns, raises, or writes for TensorBoard."""
    caplog.set_level(logging.DEBUG)
    model = make()
    batches = PLAN.batches(X, Y, optimizer=model.optimizer)
    tell = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: print(model.optimizer.session, vars(model.optimizer))
    )
    board = tfdpx.callbacks.TensorBoard(str(tmp_path), plan=PLAN)
    callbacks = [tfdpx.callbacks.PrivacyBudget(PLAN), board, tell]
    model.fit(batches, callbacks=callbacks, verbose=2)
    print(model.optimizer, vars(model), batches, PLAN, callbacks)
    print(model.optimizer.get_config(), model.optimizer.ledger, model.summary())
    for wrong in (lambda: model.fit(batches), lambda: model.fit(X, Y, batch_size=50)):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            wrong()
        print(raised.value)
    print([str(warning.message) for warning in recwarn])
    text = "".join((*capsys.readouterr(), caplog.text))
    output = text.encode("latin-1", "replace") + content(tmp_path)
    assert b"epsilon" in output and secret_words
    assert not secret_words.are_in(output)


def test_no_file_holds_numbers_of_the_data_without_noise(tmp_path):
    """Losses, metrics and broken examples are counted in variables that are never saved."""
    names, model, x = [], make(), X.copy()
    x[0] = np.nan
    model.fit(PLAN.batches(x, Y), steps_per_epoch=3, verbose=0)
    model.save_weights(tmp_path / "m.weights.h5")
    with h5py.File(tmp_path / "m.weights.h5") as file:
        file.visititems(lambda name, item: names.append((name, getattr(item, "shape", None))))
    stored = [name for name, shape in names if shape is not None]
    assert not [name for name in stored if "metric" in name or "loss" in name]
    assert not [v.path for v in model.optimizer.variables if "nonfinite" in v.path]


def built():
    model = make()
    model.optimizer.build(model.trainable_variables)
    return model


def noise_of_one_update(model):
    """Returns the change of the weights by an update without examples, which is only noise."""
    before = small.weights(model)
    model.train_on_batch(X[:20], Y[:20], sample_weight=np.zeros(20, "float32"))
    return small.weights(model) - before


def from_config(model, folder):
    other = make()
    config = keras.optimizers.serialize(model.optimizer)
    assert "seed" not in config["config"]
    other.compile(keras.optimizers.deserialize(config), loss=other.loss)
    return other


COPIES = {
    **{name: functools.partial(way, fresh=built) for name, way in copies.WAYS.items()},
    "config": from_config,
}


def after_one_update():
    model = make(seed=1)
    noise_of_one_update(model)
    return model


@pytest.fixture(scope="module")
def wanted():
    """The second update of a run with the seed."""
    return noise_of_one_update(after_one_update())


@pytest.mark.parametrize("kinds", [("load_model",), slow(tuple(COPIES))])
def test_copies_have_noise_of_their_own(kinds, tmp_path, wanted):
    """The copied optimizer may have a seed, so that its noise is known."""
    model, noises = after_one_update(), [wanted]
    for other in [COPIES[kind](model, tmp_path) for kind in kinds]:
        other.optimizer.iterations.assign(model.optimizer.iterations)
        noises.append(noise_of_one_update(other))
        assert np.abs(noises[-1]).max() > 1e-3
    assert np.abs(np.corrcoef(noises)[np.triu_indices(len(noises), 1)]).max() < 0.5
    np.testing.assert_array_equal(noise_of_one_update(model), wanted)


@pytest.mark.parametrize("seed", [1, slow(None)])
def test_assigned_iterations_repeat_no_noise(seed):
    model, noises = make(seed), []
    for _ in range(3):
        model.optimizer.iterations.assign(0)
        noises.append(noise_of_one_update(model))
    assert np.abs(np.corrcoef(noises)[np.triu_indices(3, 1)]).max() < 0.5

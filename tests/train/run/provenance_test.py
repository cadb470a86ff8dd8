"""What a model file says of the data that its weights have seen, and which starts are refused."""

import math

import keras
import pytest

from tfdpx.accounting import Ledger
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import Record
from tfdpx.train.data import identity
from tfdpx.train.errors import UserError
from tfdpx.train.run import provenance

PRIVATE = Ledger((Entry(4.0, 0.1, 60, run=7),))


@pytest.fixture
def file(tmp_path):
    """A function that makes a file whose weights were trained on the given data sets."""

    def make(*names, ledger=PRIVATE):
        path, seen = tmp_path / f"{len(list(tmp_path.iterdir()))}.keras", ()
        for name in names:
            keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]).save(path)
            Record("classify", identity.of(name), ledger, 1e-5, seen=seen).save(path)
            seen = provenance.seen_by([path])
        return path

    return make


def before(path, dataset, **given):
    return provenance.on_same_data(
        provenance.seen_by([path], given.pop("init_data", None)), dataset, **given
    )


SEEN = [
    ("sklearn_digits", "digits", True),
    ("sklearn_digits:0-4", "digits:5-9", False),
    ("sklearn_digits:0-4", "digits:4-9", True),
    ("sklearn_digits:0-4", "digits", True),
    ("mnist", "digits", False),
    ("mnist", "mnist:3.0.1", True),
    ("imagenet_resized/32x32", "imagenet2012", True),
    ("cifar10", "cifar100", False),
    ("synthetic:strokes", "digits", False),
]


def test_what_was_spent_on_the_same_data_is_found(file):
    for seen, dataset, overlaps in SEEN:
        names = (seen, "places365_small") if seen == "mnist" else ("places365_small", seen)
        assert before(file(*names), dataset) == (PRIVATE if overlaps else Ledger()), seen


def test_what_has_no_account_needs_a_word(file):
    path = file("places365_small", "digits", ledger=provenance.not_private())
    with pytest.raises(UserError, match="already, without an account.*--head_steps"):
        before(path, "digits:0-4")
    assert before(path, "digits:0-4", allow_unaccounted=True).epsilon(1e-5) == math.inf
    assert before(path, "mnist") == Ledger()
    assert before(file("digits", ledger=Ledger()), "digits") == Ledger()  # It cost nothing.
    # What files share counts once, and all else.
    other = Ledger((Entry(4.0, 0.1, 60, run=8),))
    paths = [file("digits"), file("digits", "mnist"), file("digits", ledger=other)]
    assert provenance.on_same_data(provenance.seen_by(paths), "digits") == PRIVATE + other


@pytest.mark.parametrize("name", ["other.weights.h5", "rewritten.keras"])
def test_a_file_that_does_not_say(file, tmp_path, name):
    path = tmp_path / name
    model = keras.saving.load_model(file("digits"))  # Rewritten by Keras.
    (model.save if name.endswith(".keras") else model.save_weights)(path)
    with pytest.raises(UserError, match="does not say.*name its data with --init_data"):
        provenance.seen_by([path])
    assert before(path, "digits", init_data="imagenet32") == Ledger()
    with pytest.raises(UserError, match="trained on sklearn_digits already, without"):
        before(path, "digits", init_data="digits")
    # What a file says goes before what the user says.
    assert before(file("digits"), "digits", init_data="mnist") == PRIVATE


def test_a_damaged_file(tmp_path):
    (tmp_path / "model.keras").write_bytes(b"weights")
    with pytest.raises(UserError, match="Damaged"):
        provenance.seen_by([tmp_path / "model.keras"])

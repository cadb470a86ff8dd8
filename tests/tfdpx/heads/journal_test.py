"""An interrupted fit of a head continues from what it has released, at the same epsilon."""

import fuzz_inputs
import head_cases
import numpy as np
import pytest
import tensorflow as tf
from head_cases import CLASSES, PUBLIC, WIDTH, make
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpx.callbacks import Checkpoint
from tfdpx.heads import FirstOrder, _journal


def data(count=30):
    return head_cases.data(count)


def fit(head, **arguments):
    return head.fit(*data(), **arguments)


class Killed(Exception):
    pass


def interrupted(monkeypatch, head, folder, releases):
    """Fits until so many releases are written down."""
    keep = _journal.Journal.keep

    def keep_some(self, *args):
        if len(self._kept) == releases:
            raise Killed
        keep(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(_journal.Journal, "keep", keep_some)
        fit(head, checkpoint=Checkpoint(folder))
    return head


@pytest.mark.slow
@pytest.mark.parametrize("name", head_cases.FIRST)
@pytest.mark.parametrize("releases", [1, 3])
def test_it_ends_as_the_unbroken_one_where_the_seed_is_known(tmp_path, monkeypatch, name, releases):
    whole = fit(make(name, seed=0))
    interrupted(monkeypatch, make(name, seed=0), tmp_path, min(releases, whole.num_releases - 1))
    resumed = fit(make(name, seed=0), checkpoint=Checkpoint(tmp_path))
    np.testing.assert_array_equal(resumed.kernel, whole.kernel)
    assert resumed.epsilon_spent() == whole.epsilon_spent()
    assert resumed.ledger.steps == whole.ledger.steps == whole.num_releases
    # Called once more it has nothing left to release.
    again = fit(make(name), checkpoint=Checkpoint(tmp_path))
    np.testing.assert_array_equal(again.kernel, whole.kernel)
    assert again.ledger == resumed.ledger == again.ledger + resumed.ledger


def test_without_a_seed_what_follows_has_fresh_noise_and_two_that_go_on_both_count(
    tmp_path, monkeypatch
):
    lost = interrupted(monkeypatch, make("adam"), tmp_path / "a", 2)
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a").iterdir():
        (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    one, other = (fit(make("adam"), checkpoint=Checkpoint(tmp_path / name)) for name in "ab")
    assert np.abs(one.kernel - other.kernel).max() > 0.1
    assert one.epsilon_spent() == other.epsilon_spent() == fit(make("adam")).epsilon_spent()
    assert one.ledger.steps == 4
    assert (one.ledger + other.ledger).steps == 2 + 2 + 2
    # What the process that was killed had drawn and not written down, it alone knew.
    assert lost.ledger.steps == 3


def test_releases_that_are_there_are_not_computed_again(tmp_path):
    x, y = data()
    head = fit(make("adam"), checkpoint=Checkpoint(tmp_path))

    def unreadable():
        raise AssertionError("read")
        yield x, y

    stream = tf.data.Dataset.from_generator(
        unreadable, output_signature=(tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], "int64"))
    )
    again = make("adam").fit(stream, checkpoint=Checkpoint(tmp_path))
    np.testing.assert_array_equal(again.kernel, head.kernel)


def test_another_head_or_other_data_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "c"
    interrupted(monkeypatch, make("adam"), folder, 2)
    saved = Checkpoint(folder)
    for other, reason in (
        (make("adam", steps=6), "a head with steps=4. Received: steps=6"),
        (FirstOrder(CLASSES, 2.0, steps=4), "epsilon=1.0"),
        (make("newton"), "class=FirstOrder"),
    ):
        with pytest.raises(ValueError, match=reason):
            fit(other, checkpoint=saved)
        assert other.kernel is None and not other.ledger.steps
    with pytest.raises(ValueError, match="a fit to 30 examples. Received: 20"):
        make("adam").fit(*data(20), checkpoint=saved)
    with pytest.raises(TypeError, match="must be a tfdpx.callbacks.Checkpoint"):
        fit(make("adam"), checkpoint=str(folder))
    saved.remove()
    assert not folder.exists()


def test_adamix_continues_with_the_same_public_data_only(tmp_path):
    """Else an individual epsilon was 0.03 for 0.82: steps of one set, releases of another."""
    fit(make("adamix"), checkpoint=Checkpoint(tmp_path))
    with pytest.raises(ValueError, match="with public data"):
        other = PUBLIC[0] + 1, PUBLIC[1]
        fit(make("adamix"), public_data=other, checkpoint=Checkpoint(tmp_path))
    fit(make("adamix"), checkpoint=Checkpoint(tmp_path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    make("adam").fit(*data(), checkpoint=Checkpoint(folder))
    return folder


@settings(max_examples=60)
@given(number=st.integers(0, 4), how=fuzz_inputs.damage(600))
def test_any_damage_is_refused(whole, number, how):
    path = sorted(whole.iterdir())[number]
    content = path.read_bytes()
    changed = fuzz_inputs.damaged(content, how)
    path.write_bytes(changed)
    head = make("adam")
    try:
        fit(head, checkpoint=Checkpoint(whole))
    except ValueError as error:
        assert "cannot be continued" in str(error)
        assert head.kernel is None
    else:
        assert changed.split() == content.split()  # White space in JSON.
    finally:
        path.write_bytes(content)


def test_a_release_that_is_missing_is_refused(whole, tmp_path):
    for path in sorted(whole.iterdir()):
        if path.name != "tfdpx-000000002.release":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="a release before it is missing"):
        fit(make("adam"), checkpoint=Checkpoint(tmp_path))

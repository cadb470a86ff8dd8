"""Which data the weights that a run starts from have seen, and what was spent on them.

A model that saw the private data before would have a guarantee for its last training alone. So
every program that trains on somebody's weights or features reads their records here: what was spent
on the same data is added, and weights that saw them without an account are refused.
"""

import dataclasses
import pathlib

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import Seen
from tfdpx.train.data import identity
from tfdpx.train.errors import UserError
from tfdpx.train.run import side_by_side


def not_private(steps=1):
    """The `Ledger` of so many updates without noise."""
    return Ledger((Entry(0.0, 1.0, steps),))


def seen_by(paths, init_data=None):
    """The trainings behind the weights in files.

    Args:
        paths: Paths of `.keras` or `.weights.h5` files.
        init_data: Optional string as of `--dataset`: what a file that does not say was trained on,
            by the user's word.

    Returns:
        Tuple of `Seen`, each once.

    Raises:
        UserError: If a file does not say and the user neither, or its record is damaged.
    """
    found = [seen for path in paths for seen in _seen_by(str(path), init_data)]
    return tuple(dict.fromkeys(found))


def on_same_data(seen, dataset, allow_unaccounted=False):
    """What was spent before on a data set, by those of `seen` that may have had its examples.

    Args:
        seen: Tuple of `Seen`.
        dataset: String as of `--dataset`.
        allow_unaccounted: Bool: what had no account makes epsilon infinite, in place of an error.

    Returns:
        `Ledger`.

    Raises:
        UserError: If one of them had the examples without an account.
    """
    before = Ledger()
    for each in seen:
        if not (each.ledger.steps and identity.overlap(each.data, dataset)):
            continue
        known = each.epsilon < float("inf") and each.ledger.is_complete
        if not known and not allow_unaccounted:
            raise UserError(
                f"The weights to start from were trained on {each.data.name} already, without an "
                f"account: no epsilon of this run would be true. Received: --dataset={dataset}. "
                "Start from weights that have not seen these data, or that tfdpx trained on them. "
                "To train the last layer first and then all, give one run of classify "
                "--head_steps. With --allow_seen_data classify reports an infinite epsilon."
            )
        before += each.ledger if known else not_private()
    return before


def about(before, plan):
    """A line on what the weights have spent on the data of a plan before it.

    Args:
        before: `Ledger`.
        plan: `tfdpx.PrivacyPlan`.
    """
    epsilon = before.composed_epsilon(plan.delta, plan.accountant)
    return (
        f"The weights to start from have seen these data at epsilon {epsilon:.4g}; this run is "
        "recorded together with it."
    )


def files(settings):
    """Paths of the files that a run starts from, of `--init_from` and `--features`.

    Args:
        settings: A `settings.RunSettings`.
    """
    features = side_by_side.files(getattr(settings, "features", None))
    return [settings.init_from, *features] if settings.init_from else features


def without_secrets(settings):
    """Settings for a record: neither the seed nor where anything lies.

    Args:
        settings: A `settings.RunSettings`.

    Returns:
        Dict of JSON values.
    """
    recorded = dataclasses.asdict(settings)
    del recorded["seed"]  # Who knows it can take the noise away.
    for name in ("dataset", "init_data"):
        recorded[name] = recorded.get(name) and identity.called(recorded[name])
    for name in ("init_from", "features"):
        recorded[name] = without_paths(recorded.get(name))
    return recorded


def without_paths(text):
    """What `--init_from` or `--features` names, by the last two parts of each path; None if None.

    Args:
        text: String or None.
    """
    return text and "+".join("/".join(pathlib.Path(part).parts[-2:]) for part in text.split("+"))


def _seen_by(path, init_data):
    try:
        record = records.read(path) if path.endswith(".keras") else None
    except (OSError, ValueError) as error:
        raise UserError(f"Damaged: what the file says of its training data: {error}") from error
    if record is None or record.data is None:
        if init_data is None:
            raise UserError(
                f"The file {path} does not say what it was trained on. If it was trained on none "
                "of the private data, name its data with --init_data."
            )
        return (Seen(identity.of(init_data), not_private()),)
    return (*record.seen, Seen(record.data, record.ledger, record.delta))

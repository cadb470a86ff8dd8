"""`classify --head=NAME`: a private head of `tfdpx.heads` on the features of a trained model.

The programs `features` and `adamix` do it, with their record, account and files.
"""

from absl import flags

from tfdpx.train import adamix, features
from tfdpx.train.errors import UserError

# The method of `features` for each head; AdaMix has a program of its own.
_METHODS = {
    "least_squares": "dp_ls",
    "newton": "dp_newton",
    "feature_covariance": "dp_fc",
    "first_order": "dp_adam",
    "adamix": None,
}
_HEAD = flags.DEFINE_enum(
    "head",
    None,
    list(_METHODS),
    "Instead of updates: train the last layer alone by this head of tfdpx.heads, on features of "
    "--init_from that are kept in --workdir.",
)
flags.DEFINE_string("public_dataset", None, "With --head=adamix: public images of these classes.")
flags.DEFINE_integer("shots", None, "With --head=adamix: as for tfdpx.train.adamix.")


def from_flags(given):
    """Fits the head that the flags ask for, and returns the report; None without --head.

    Args:
        given: Dict of the values of other flags that the user gave.

    Raises:
        UserError: If a flag does not go with a head, or as `features.run` and `adamix.run`.
    """
    head, here = _HEAD.value, ("public_dataset", "shots", "dry_run")
    given = {**given, **{name: flags.FLAGS[name].value or None for name in here}}
    given = {name: value for name, value in given.items() if value is not None}
    if head is None:
        if {"public_dataset", "shots"} & set(given):
            raise UserError("Flags --public_dataset and --shots belong to --head=adamix.")
        return None
    if given.pop("trainable", "last") != "last":
        raise UserError("Flag --head trains the last layer alone: leave out --trainable.")
    method = _METHODS[head]
    program = features if method else adamix
    values = flags.FlagValues()
    program.define_flags(values)
    values.mark_as_parsed()
    for name, value in given.items():
        if name not in values:
            taken = ", ".join(f"--{name}" for name in values if name in flags.FLAGS)
            raise UserError(
                f"Flag --{name} does not go with --head={head}, which chooses the rest itself. "
                f"Received: --{name}={value}. Of the flags of classify it takes {taken}."
            )
        setattr(values, name, value)
    if method:
        values.method = method
    return program.run(values)

"""The guarantee of a mixed training in words, and whom it leaves out."""

from tfdpx.accounting.statement import rounded_up


def of(head, num_examples, num_public):
    """A paragraph; see `tfdpx.AdaMix.statement`.

    Args:
        head: `tfdpx.AdaMix`.
        num_examples: Int, number of private examples.
        num_public: Int, number of public examples.
    """
    public = f"The {num_public} public examples get no guarantee: the weights may tell all of them."
    if head.use == "everything":
        return "There is no differential privacy: epsilon is infinite."
    if head.use == "public":
        return f"No private example was read: epsilon is 0. {public}"
    if head.use == "private":
        num_examples, public = num_examples + num_public, ""
    epsilon = rounded_up(head.plan(num_examples).epsilon)
    said = (
        f"The weights are ({epsilon}, {head.delta:g})-differentially "
        f"private for the {num_examples} private examples, under adding or removing one: "
        f"{head.steps} Gaussian releases of all of them at noise multiplier "
        f"{head.noise_multiplier:g}, accountant {head.accountant}. {public}"
    ).strip()
    if head.seed is not None:
        said += " That holds for whoever does not know the seed; do not release the weights."
    return said

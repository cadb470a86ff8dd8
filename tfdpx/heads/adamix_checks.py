"""What a mixed training refuses before its first release."""

import math

import numpy as np

from tfdpx._arguments import is_number, require
from tfdpx.heads.public_set import PublicSet
from tfdpx.sampling import overlap

ROWS = 8192


def check_positive(name, value, hint=""):
    """Raises ValueError unless `value` is a positive, finite number."""
    fits = is_number(value) and 0 < value < math.inf
    require(fits, name, value, "be a positive, finite number", hint)


def check_switches(use, start, clip, projection):
    """Raises ValueError if public examples that count as private would decide anything openly."""
    if use == "private" and (start, clip, projection) != ("initial", "fixed", None):
        raise ValueError(
            'Argument `use`="private" protects the public examples too, so they may not choose '
            f'start, clip or subspace. Received: start="{start}", clip="{clip}", '
            f'projection={projection}. Use start="initial", clip="fixed" and projection=None, or '
            'use="mixed".'
        )


def public_set(head, data):
    """The `PublicSet` of `data`, or None if that is None and the head needs none.

    Args:
        head: `tfdpx.AdaMix`, whose settings are read.
        data: `public_data` as of `AdaMix.fit`.

    Raises:
        ValueError: If what needs public examples has none, or they are unfit.
    """
    needs = [
        f'{name}="{value}"'
        for name, value, free in (
            ("use", head.use, ("mixed", "private", "everything")),
            ("start", head.start, ("initial",)),
            ("clip", head.clip, ("fixed",)),
        )
        if value not in free
    ]
    if head.projection is not None:
        needs.append(f"projection={head.projection}")
    if data is None and needs:
        raise ValueError(
            f"Argument `public_data` is missing. Received: None, with {', '.join(needs)}. Give a "
            'pair (features, labels), or use start="initial", clip="fixed" and projection=None, '
            "which need none."
        )
    if data is None:
        return None
    public = PublicSet(data, head.num_classes)
    check_single_labels("public_data", public.y)
    return public


def check_private(examples, public):
    """One pass over private examples: widths, labels, and that none of them is public.

    Args:
        examples: `tfdpx.heads._feature_source.Examples`.
        public: `PublicSet`, or None.

    Raises:
        ValueError: If something does not fit.
    """
    known = None
    if public is not None:
        if public.x.shape[1] != examples.dimension:
            raise ValueError(
                "Arguments `features` and `public_data` must have one width. Received: "
                f"{examples.dimension} and {public.x.shape[1]}."
            )
        known = overlap.Fingerprints(public.x)
    found = 0
    for x, y in examples.chunks(ROWS):
        check_single_labels("labels", y)
        found += 0 if known is None else known.count_in(x)
    overlap.refuse(found, examples.count)


def check_single_labels(name, targets):
    """Raises ValueError unless each row of zeros and ones has a single one."""
    wrong = int(np.sum(targets.sum(axis=1) != 1))
    if wrong:
        raise ValueError(
            f"Argument `{name}` must give each example one class: the loss is a softmax cross-"
            f"entropy. Received: {wrong} examples with none or several. For those use tfdpx.heads."
        )

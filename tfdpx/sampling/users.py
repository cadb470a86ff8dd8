"""Examples grouped by person: an update draws people, and some examples of each.

Every update draws people by Poisson sampling, and for each of them up to k examples without
replacement. The choice of a person's examples depends only on the key of the update and on the
person. It never depends on the data of another person.
"""

import hashlib
import numbers
import unicodedata

import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx._arguments import check_positive_integer
from tfdpx.sampling.class_weights import multiply
from tfdpx.sampling.inputs import present_of_users

DEFAULT_PER_USER = 4

# This number is folded into a key. So the choice of examples differs from other uses of the key.
_CHOICE_KEY = int.from_bytes(b"choices", "big")

# Values that programs write for a missing id. All people with such an id would count as one person.
_MISSING = ("", "nan", "none", "nat", "na", "null", "unknown", "missing", "undefined")
_MISSING_INTS = (-1, -(2**31), -(2**63), 2**32 - 1, 2**63, 2**64 - 1)
# Unicode categories of control and format characters, for example a byte order mark.
_UNSEEN = ("Cc", "Cf")
# Unicode categories of punctuation, and of signs such as "<" and "+".
_MARKS = ("P", "Sm", "Sk")


class Users:
    """People and their examples, with the same interface as `tfdpx.sampling.examples.Examples`.

    Args:
        examples: `Examples` or `RandomAccess`.
        user_ids: Array [number of examples] of ints or strings, the person of each example.
        per_user: Int k, the largest number of examples of a person in an update.
        class_weight: Optional `tfdpx.sampling.class_weights.ClassWeights`. They multiply the sample
            weights, and not clipped gradients, because a person has a single gradient for examples
            of all classes.

    Attributes:
        examples: The argument `examples`.
        count: Int, the number of people.
        per_user: The argument `per_user`.
        is_weighted: Bool, whether examples have weights.

    Raises:
        ValueError: If the number of ids is not the number of examples, an id is missing or of
            another type, or two ids differ only in spelling.
    """

    def __init__(self, examples, user_ids, per_user=DEFAULT_PER_USER, class_weight=None):
        check_positive_integer("examples_per_user", per_user)
        self.examples, self.per_user = examples, int(per_user)
        self._class_weight = class_weight
        self.is_weighted = examples.is_weighted or class_weight is not None
        owners, self.count = numbered(user_ids, examples.count)
        self._digest = hashlib.blake2b(owners.tobytes()).hexdigest()
        counts = np.bincount(owners)
        with tf.device("CPU:0"):
            # The indices of examples, sorted by person.
            self._places = tf.constant(np.argsort(owners, kind="stable"), tf.int64)
            self._counts = tf.constant(counts, tf.int64)
            self._starts = tf.constant(np.cumsum(counts) - counts, tf.int64)

    def batch(self, rows, capacity, key):
        """Returns k examples of each of the people `rows`, padded to `capacity` people.

        If a person has fewer than k examples, the first example is repeated with weight 0, which
        marks it as absent. With sample weights, the values of absent examples are replaced by the
        person's first present example, because an absent example may hold any values.

        Args:
            rows: int64 tensor [n], the numbers of people, n <= capacity.
            capacity: Int, the number of people in a batch.
            key: int64 tensor [2], the key of the update.

        Returns:
            Tuple `(x, y, sample_weight)` of tensors of static shapes `[capacity, k, ...]`.
        """
        chosen, present = self._chosen(rows, key)
        x, y, weights = self.examples.batch(tf.reshape(chosen, [-1]), capacity * self.per_user)
        if self._class_weight is not None:
            weights = multiply(weights, self._class_weight.of_labels(y))
        batch = x, y, weights
        batch = tf.nest.map_structure(lambda t: None if t is None else self._by_person(t), batch)
        x, y, weights = batch
        present = tf.pad(present, [[0, capacity - tf.shape(rows)[0]], [0, 0]])
        weights = tf.nest.map_structure(lambda w: tf.where(_like(present, w), w, 0.0), weights)
        if self.is_weighted:
            has_weight, numbers = present_of_users(weights), tf.range(self.per_user, dtype=tf.int64)
            places = tf.where(
                has_weight, numbers, tf.argmax(tf.cast(has_weight, "int32"), 1)[:, tf.newaxis]
            )
            x, y = tf.nest.map_structure(
                lambda t: None if t is None else tf.gather(t, places, batch_dims=1), (x, y)
            )
        return x, y, weights

    def _by_person(self, tensor):
        rows, *rest = tensor.shape
        return tf.reshape(tensor, [rows // self.per_user, self.per_user, *rest])

    def _chosen(self, rows, key):
        """Returns k examples of each person: their indices, int64 [n, k], and if they exist, bool.

        The examples are chosen without replacement by Floyd's algorithm.
        """
        k, counts = self.per_user, tf.gather(self._counts, rows)[:, tf.newaxis]
        # Random bits are made for all people. So a person's choice does not depend on the other
        # people in the draw.
        bits = noise.words([self.count, k], noise.fold_in(key, _CHOICE_KEY), tf.uint32)
        bits = tf.cast(tf.gather(bits, rows), tf.uint64)
        chosen, shift = tf.zeros([tf.shape(rows)[0], 0], tf.int64), tf.constant(32, tf.uint64)
        for number in range(k):
            # Floyd's index runs from counts - k to counts - 1. With fewer than k examples it starts
            # at 0.
            last = tf.where(counts > k, counts - k, 0) + number
            below = tf.cast(last + 1, tf.uint64)
            place = tf.bitwise.right_shift(bits[:, number, tf.newaxis] * below, shift)
            place = tf.cast(place, tf.int64)
            taken = tf.reduce_any(chosen == place, axis=1, keepdims=True)
            place = tf.where(taken | (counts <= k), last, place)
            chosen = tf.concat([chosen, place], axis=1)
        present = tf.range(k, dtype=tf.int64) < counts
        chosen = tf.where(present, chosen, 0) + tf.gather(self._starts, rows)[:, tf.newaxis]
        return tf.gather(self._places, chosen), present

    def fingerprint(self):
        """Returns a string that identifies these examples and their people."""
        return f"{self.examples.fingerprint()} {self._digest} {self.per_user}"


def check_order(x, y, user_ids):
    """Raises ValueError if the order of the ids may differ from the order of the examples.

    Args:
        x: As for `PrivacyPlan.batches`.
        y: As for `PrivacyPlan.batches`.
        user_ids: As for `Users`.

    Raises:
        ValueError: If `x` is a `tf.data.Dataset`, or if `x` or `y` has another pandas index than
            `user_ids`.
    """
    if isinstance(x, tf.data.Dataset):
        raise ValueError(
            "Argument `user_ids` needs examples in the order of the ids, but a tf.data.Dataset may "
            "shuffle. Received: x of type tf.data.Dataset. Pass arrays or a `tfdpx.RandomAccess`."
        )
    index, *indexes = (getattr(array, "index", None) for array in (user_ids, x, y))
    is_pandas = hasattr(index, "equals")  # A list also has `index`, which is a method.
    if is_pandas and any(hasattr(o, "equals") and not index.equals(o) for o in indexes):
        raise ValueError(
            "Argument `user_ids` must have the pandas index of `x` and `y`, because ids belong to "
            "rows by their order alone. Received: another index. Reorder them, as in "
            "`user_ids.loc[x.index]`, or pass `user_ids.to_numpy()` if the order is right."
        )


def _like(flags, tensor):
    """Reshapes `flags` [B, k] to the rank of `tensor`, by trailing axes of length one."""
    return flags[(..., *[tf.newaxis] * (tensor.shape.rank - 2))]


def numbered(user_ids, count):
    """Returns the number of each example's person, int64 [count], and the number of people.

    People are numbered from 0.

    Args:
        user_ids: As for `Users`.
        count: Int, the number of examples.

    Raises:
        ValueError: As for `Users`.
    """
    values = user_ids.numpy() if hasattr(user_ids, "numpy") else user_ids
    if isinstance(values, np.ma.MaskedArray):
        values = values.tolist()  # Masked ids become None.
    values = np.asarray(values, dtype=None if hasattr(values, "dtype") else object)
    if values.shape != (count,):
        raise ValueError(
            f"Argument `user_ids` must hold an id per example. Received: shape {values.shape}, for "
            f"{count} examples."
        )
    values = values.tolist()
    kinds = {_kind(value) for value in values}
    if len(kinds) != 1 or None in kinds:
        odd = next((value for value in values if _kind(value) is None), None)
        names = sorted({type(value).__name__ for value in values})
        received = f"types {names}" if odd is None and len(kinds) > 1 else f"the id {odd!r}"
        raise ValueError(
            "Argument `user_ids` must hold ints, or strings that are not empty, -1, 'nan', "
            "'unknown', '?' or the like: two people with one id would be protected less. Received: "
            f"{received}. Convert all ids to one type, and give every example of an unknown person "
            "a separate id. If a person is called so, add a letter to the id."
        )
    numbers_of, spelled = {}, {}
    for value in dict.fromkeys(values):
        spelled_alike = spelling(value)
        if isinstance(spelled_alike, str):
            # Normalizes again, because there are composed letters that exist only in lower case.
            spelled_alike = unicodedata.normalize("NFKC", spelled_alike.casefold())
        other = spelled.setdefault(spelled_alike, value)
        if other != value:
            raise ValueError(
                "Argument `user_ids` must spell the id of a person in one way: a person with two "
                f"would be protected less. Received: {other!a} and {value!a}. Strip all ids and "
                "write them in lower case, or rename one of these."
            )
    owners = [numbers_of.setdefault(value, len(numbers_of)) for value in values]
    return np.array(owners, "int64"), len(numbers_of)


def _kind(value):
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return None if value in _MISSING_INTS else int
    if isinstance(value, (str, bytes)):
        text = spelling(value).lower()
        # Without marks, "N/A", "<NA>" and "#n/a" are the same word; "?", "-" and "..." become
        # empty.
        word = "".join(c for c in text if not unicodedata.category(c).startswith(_MARKS))
        if word.strip() not in _MISSING and text not in map(str, _MISSING_INTS):
            return type(value)
    return None


def spelling(value):
    """Returns an id in a spelling that is the same for all ids that look alike.

    A string in this spelling has no control characters, single spaces between words, and accents
    composed with their letters. Other ids are returned unchanged.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        return value
    # Removed first, because an invisible mark between a letter and its accent prevents composition.
    visible = (c for c in value if c.isspace() or unicodedata.category(c) not in _UNSEEN)
    return " ".join(unicodedata.normalize("NFKC", "".join(visible)).split())

"""Clips at a quantile of the norms of public examples, whose gradients join the update (AdaMix).

In every update gradients of public examples are added without clipping or noise, and the private
ones are clipped to a quantile of the public norms ("Mixed Differential Privacy in Computer Vision",
section 3.2). An update is then

    g = 1/C * (1/B sum_i clip_tau(g_i) + tau sigma/B xi + 1/n sum_j public g_j),

with C the `l2_norm_clip`, tau the quantile (C itself without one) and n the plan's number of
examples, so that a public example counts as much as a private one.

Guarantee: the same as `tfdpx.mechanism`, for the private examples alone. tau and the public
gradients are functions of public examples and of weights that were released already; the private
sum is clipped in units of tau and gets its noise there, before tau multiplies it. The public
examples have no guarantee: the weights may reveal all of them.
"""

import hashlib

import keras
import numpy as np
import tensorflow as tf

from tfdpx import mechanism
from tfdpx._arguments import is_number, require
from tfdpx._warnings import warn
from tfdpx.checks import UnfitForPrivacy
from tfdpx.sampling import overlap
from tfdpx.sampling.batch_sampler import sampler_of
from tfdpx.sampling.examples import Examples, as_examples
from tfdpx.training.clip_policy import ClipPolicy, UpdateClip

# Public norms may fall to zero; a clip may not.
_LEAST_CLIP = 1e-6
_ROWS = 4096


def checked(given):
    """The `PublicClip` or `AbsentPublicClip` of settings, or None.

    Args:
        given: Arguments as `tfdpx.DPSGD` takes them, by name.

    Raises:
        ValueError: If they do not fit.
    """
    quantile = given.public_quantile
    fits = quantile is None or (is_number(quantile) and 0 < quantile <= 1)
    require(fits, "public_quantile", quantile, "lie in (0, 1], or be None for a fixed clip")
    data = given.public_data
    if data is None:
        return None
    if given.plan is None:
        raise ValueError(
            "Argument `public_data` needs a `plan`, whose num_examples says what a public example "
            "weighs against the private ones. Received: plan=None."
        )
    if given.l2_norm_clip == float("inf"):
        raise ValueError(
            "Argument `l2_norm_clip` must be finite with `public_data`. Received: l2_norm_clip=inf."
        )
    if isinstance(data, dict) and set(data) == {"digest", "count"}:
        return AbsentPublicClip(data, quantile, float(given.l2_norm_clip))
    if not isinstance(data, (tuple, list)) or len(data) != 2 or data[1] is None:
        raise ValueError(
            "Argument `public_data` must be a pair (x, y) of arrays as the model takes them. "
            f"Received: {type(data).__name__}."
        )
    return PublicClip(*data, quantile, given.plan.num_examples, float(given.l2_norm_clip))


class AbsentPublicClip(ClipPolicy):
    """Public examples that a loaded or copied optimizer is known to have had, and has not.

    Args:
        examples: Dict of their digest and count.
        quantile: Float in (0, 1], or None.
        l2_norm_clip: Float, C.
    """

    def __init__(self, examples, quantile, l2_norm_clip):
        super().__init__(l2_norm_clip)
        self._examples, self._quantile = dict(examples), quantile

    def arguments(self):
        """The clip, `public_data` of what a file may hold of it, and `public_quantile`."""
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "public_data": dict(self._examples),
            "public_quantile": self._quantile,
        }

    def check_data(self, data):
        """Raises ValueError: there is nothing to train with."""
        raise ValueError(
            f"This optimizer was made with `public_data` of {self._examples['count']} examples, "
            "and configurations and files do not hold them. Compile the model with a new optimizer "
            "that is given `public_data=(x, y)`; its account continues."
        )

    def begin(self, *args):
        """As `check_data`."""
        self.check_data(args)


class PublicClip(ClipPolicy):
    """Public examples of one optimizer. All of them go through the model at once in each update.

    Args:
        x: Array `[n, ...]` of numbers, or nest of such, as the model takes them.
        y: Like `x`.
        quantile: Float in (0, 1], or None.
        num_examples: Int, of the plan.
        l2_norm_clip: Float, C.

    Raises:
        ValueError: If there are no examples, or values are not finite.
    """

    def __init__(self, x, y, quantile, num_examples, l2_norm_clip):
        super().__init__(l2_norm_clip)
        Examples(x, y)  # Of one length, dense, not empty.
        self._x, self._y = (tf.nest.map_structure(tf.convert_to_tensor, part) for part in (x, y))
        self._x = tf.nest.map_structure(_in_floatx, self._x)
        self._quantile, self._num_examples = quantile, num_examples
        leaves = [t.numpy() for t in tf.nest.flatten((self._x, self._y))]
        unfit = [t.dtype for t in leaves if t.dtype == object or not np.isfinite(t).all()]
        if unfit:
            raise ValueError(
                "Argument `public_data` must hold finite numbers: the clip follows them. Received: "
                f"others in an array of dtype {unfit[0]}."
            )
        self.count = len(leaves[0])
        digest = hashlib.blake2b(digest_size=16)
        for leaf in leaves:
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        self._digest = digest.hexdigest()
        self._known = overlap.Fingerprints(_rows(self._x))

    def __repr__(self):
        return f"<public_data of {self.count} examples>"

    def arguments(self):
        """The clip, `public_data` of what a file may hold of it, and `public_quantile`."""
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "public_data": {"digest": self._digest, "count": self.count},
            "public_quantile": self._quantile,
        }

    def specs(self, count):
        """Of the clip, a scalar."""
        return () if self._quantile is None else (tf.TensorSpec([], tf.float32),)

    def whole(self, count):
        """C."""
        return () if self._quantile is None else (tf.constant(self.l2_norm_clip),)

    def factors(self, squared_norms, present, batch_size, *clips):
        """`mechanism.clip_factors` at the clip of the update."""
        [clip] = clips or (self.l2_norm_clip,)
        return mechanism.clip_factors(squared_norms, present, clip, batch_size)

    def check_data(self, data):
        """Raises ValueError if private examples, of a plan's batches or arrays, are public ones."""
        draws = sampler_of(data)
        examples = None if draws is None else draws.examples
        if examples is None and data is not None and not isinstance(data, tf.data.Dataset):
            if all(hasattr(leaf, "shape") for leaf in tf.nest.flatten(data)):
                examples = as_examples(data)
        if not isinstance(examples, Examples):
            warn(
                "Whether private examples are among `public_data` is not looked for here: only in "
                "arrays, and in `plan.batches` of arrays. One that is has no guarantee.",
            )
            return
        found = 0
        for start in range(0, examples.count, _ROWS):
            places = tf.range(start, min(start + _ROWS, examples.count), dtype=tf.int64)
            found += self._known.count_in(_rows(examples.batch(places, len(places))[0]))
        overlap.refuse(found, examples.count)

    def begin(self, model, engine, rows, y, context, key):
        """The clip of an update, and the public part of its gradient.

        Raises:
            ValueError: If shapes or dtypes are not those of the private examples.
            UnfitForPrivacy: On several replicas.
        """
        if context.num_replicas_in_sync > 1:
            raise UnfitForPrivacy(
                f"Training with `public_data` on {context.num_replicas_in_sync} replicas is not "
                "supported. Train on one."
            )
        for name, own, other in (("x", self._x, rows), ("y", self._y, y)):
            kinds = [_kind(part, name == "x") for part in (own, other)]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"Argument `public_data` must hold {name} like the private examples, "
                    f"as the model sees it. Received: {kinds[0]}, for private {kinds[1]}."
                )
        y = tf.nest.map_structure(lambda own, other: tf.cast(own, other.dtype), self._y, y)
        result = engine.with_views(1)(self._x, y, None, key=key)
        finite = tf.math.is_finite(result.squared_norms)
        gradients = result.clipped_sums(tf.cast(finite, "float32"))
        clips, scale = (), 1.0
        if self._quantile is not None:
            norms = tf.sort(tf.sqrt(tf.where(finite, result.squared_norms, 0.0)))
            clips = (tf.maximum(_quantile(norms, self.count, self._quantile), _LEAST_CLIP),)
            scale = clips[0] / self.l2_norm_clip
        weight = 1 / (self._num_examples * self.l2_norm_clip)

        def join(private):
            pairs = zip(private, gradients, strict=True)
            return [noisy.times(scale).plus(weight * public) for noisy, public in pairs]

        return UpdateClip(clips, join)


def _quantile(ordered, count, quantile):
    """NumPy's linear quantile of `count` sorted values."""
    place = quantile * (count - 1)
    below = int(place)
    above = min(below + 1, count - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _in_floatx(tensor):
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor


def _kind(nest, with_dtype):
    return [
        (*t.shape[1:], t.dtype.name) if with_dtype else tuple(t.shape[1:])
        for t in tf.nest.flatten(nest)
    ]


def _rows(x):
    leaves = [np.asarray(leaf, "float64") for leaf in tf.nest.flatten(x)]
    return np.hstack([leaf.reshape(len(leaf), -1) for leaf in leaves])

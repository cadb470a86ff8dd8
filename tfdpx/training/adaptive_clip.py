"""A clip that follows a quantile of the gradients' norms, by a noisy count (Andrew et al. 2019).

After each update the clip C becomes `C exp(-learning_rate (b - quantile))` (arXiv:1905.03871), with
b a noisy share of the examples whose norm is at most C. The update itself is still in units of C.

Guarantee: as for the optimizer's noise multiplier sigma, which the ledger counts. An update
releases the clipped sum with noise z and the sum of (indicator - 1/2) with noise sigma_b, where
1/z^2 = 1/sigma^2 - 1/(2 sigma_b)^2. Scaled by z/sigma_b the second has noise z too; one example
moves both together by at most sqrt(1 + (z / (2 sigma_b))^2) = z/sigma: one Gaussian mechanism.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from tfdpx import mechanism
from tfdpx._arguments import is_number, require
from tfdpx.per_example.rounding import SMALLEST_CLIP
from tfdpx.training.clip_policy import ClipPolicy, UpdateClip

_LARGEST_CLIP = _LARGEST_NOISE = 1e9
# Of the count's noise: the share of a batch that the paper advises, and the least in units of
# sigma by default, which costs the gradients 3% more noise.
_OF_BATCH, _OF_SIGMA = 1 / 20, 2.0
# The indicator falls from 1 to 0 over this part of the clip. At a cliff, an example more that
# moves the others to other rows, where they are rounded otherwise, could move many of them across.
_RAMP = 0.1


@keras.saving.register_keras_serializable(package="tfdpx")
class AdaptiveClip(ClipPolicy):
    """The clip follows a quantile of the norms; `DPSGD(l2_norm_clip=tfdpx.AdaptiveClip())`.

    It is a variable of the optimizer, so that Keras's files, `Checkpoint` and copies keep it, and
    `l2_norm_clip` in the logs. It reveals nothing that the optimizer's noise multiplier does not
    count. As with any clip, the update is divided by it: the learning rate needs no change.

    Args:
        initial: Float from 1e-9 to 1e9, the clip of the first update. It need not fit: at
            `learning_rate=0.2` a clip moves by a factor of 10 in some 23 updates.
        quantile: Float between 0 and 1: the share of the norms that are to be at most the clip.
        learning_rate: Float > 0, of the logarithm of the clip.
        noise_multiplier: Optional float, sigma_b: standard deviation of the noise on the count of
            examples, which must exceed half of the optimizer's. None: a twentieth of the batch
            size, but at least twice the optimizer's.

    Attributes:
        l2_norm_clip: Float, the clip now.

    Raises:
        ValueError: If an argument is out of range; by the optimizer, if `noise_multiplier` is too
            small for its own.
    """

    def __init__(
        self,
        initial: float = 1.0,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
        noise_multiplier: float | None = None,
    ) -> None:
        fits = is_number(initial) and SMALLEST_CLIP <= initial <= _LARGEST_CLIP
        require(fits, "initial", initial, f"lie in [{SMALLEST_CLIP}, {_LARGEST_CLIP:g}]")
        fits = is_number(quantile) and 0 < quantile < 1
        require(fits, "quantile", quantile, "lie strictly between 0 and 1")
        fits = is_number(learning_rate) and 0 < learning_rate < math.inf
        require(fits, "learning_rate", learning_rate, "be a finite float > 0")
        own = noise_multiplier
        fits = own is None or is_number(own) and 0 <= own <= _LARGEST_NOISE
        require(fits, "noise_multiplier", own, f"lie in [0, {_LARGEST_NOISE:g}], or be None")
        self.initial, self.quantile = float(initial), float(quantile)
        self.learning_rate = float(learning_rate)
        self.noise_multiplier = None if own is None else float(own)
        self._clip: Any = None

    @property
    def l2_norm_clip(self) -> float:  # type: ignore[override]
        """Float: the clip now; the initial one before an optimizer has it."""
        now = self._clip if self._clip is None else keras.ops.convert_to_numpy(self._clip)
        return self.initial if now is None else min(max(float(now), SMALLEST_CLIP), _LARGEST_CLIP)

    def build(self, optimizer: Any) -> None:
        """Adds the clip to the optimizer's variables, and shares its noise out."""
        sigma, own = optimizer.noise_multiplier, self.noise_multiplier
        if own is None:
            own = max(_OF_BATCH * optimizer.batch_size, _OF_SIGMA * sigma)
        ratio = sigma / (2 * own) if own else float(sigma > 0)
        if ratio >= 1:
            raise ValueError(
                "Argument `noise_multiplier` of AdaptiveClip must exceed half of the optimizer's, "
                f"{sigma / 2:.6g}: the count alone would reveal what both may. Received: "
                f"noise_multiplier={own}. Give {_OF_SIGMA * sigma:.3g} or more, or leave it out."
            )
        # Without noise the count has none either, and may have any weight.
        self._noise = sigma / math.sqrt(1 - ratio**2)
        self._weight = self._noise / own if sigma else 1.0
        start = keras.initializers.Constant(self.initial)
        self._clip = optimizer.add_variable([], start, "float32", name="l2_norm_clip")

    def noise_of_gradients(self, noise_multiplier: float) -> float:
        """The z of the guarantee: above the argument, by what the count takes."""
        return self._noise

    def begin(self, *args: Any) -> UpdateClip:
        """The clip of an update."""
        return UpdateClip((self._now(),))

    def specs(self, count: int | None) -> tuple[tf.TensorSpec, ...]:
        """Of the clip, a scalar."""
        return (tf.TensorSpec([], tf.float32),)

    def whole(self, count: int) -> tuple[tf.Tensor, ...]:
        """The initial clip."""
        return (tf.constant(self.initial),)

    def factors(self, squared_norms: Any, present: Any, batch_size: int, *clips: Any) -> tf.Tensor:
        """`mechanism.clip_factors` at the clip of the update."""
        return mechanism.clip_factors(squared_norms, present, clips[0], batch_size)

    def measured(
        self, squared_norms: Any, present: Any, of_rows: Any, clips: Any, count: Any
    ) -> tf.Tensor:
        """Scalar: the sum of (indicator - 1/2) over the examples that are present."""
        excess = tf.sqrt(squared_norms) / clips[0] - 1.0
        below = tf.clip_by_value(0.5 - excess / _RAMP, 0.0, 1.0)
        # What is not finite counts as above the clip.
        below = tf.where(tf.math.is_finite(excess), below, 0.0)
        return tf.reduce_sum(tf.where(present, below - 0.5, 0.0))

    def nothing_measured(self, count: Any) -> tf.Tensor:
        """Zero."""
        return tf.zeros([])

    def to_release(self, measured: Any, batch_size: int) -> list[tf.Tensor]:
        """The sum, in units in which the gradients' noise is sigma_b."""
        return [measured * (self._weight / batch_size)]

    def learn(self, noisy: tf.Tensor) -> None:  # type: ignore[override]
        """The geometric update of the clip."""
        share = 0.5 + noisy / self._weight
        moved = self._now() * tf.exp(-self.learning_rate * (share - self.quantile))
        self._clip.assign(moved)

    def released(self) -> dict[str, float]:
        """The clip now, by its name in the logs."""
        return {"l2_norm_clip": self.l2_norm_clip}

    def get_config(self) -> dict:
        """Arguments of the constructor."""
        names = ("initial", "quantile", "learning_rate", "noise_multiplier")
        return {name: getattr(self, name) for name in names}

    def _now(self):
        """float32 scalar: the clip, within what float32 can clip at whatever was learned."""
        now = tf.convert_to_tensor(self._clip.value)
        return tf.clip_by_value(now, SMALLEST_CLIP, _LARGEST_CLIP)

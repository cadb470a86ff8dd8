"""Normalizes every gradient in place of clipping it (Bu et al. 2022, arXiv:2206.07136).

An update is `1/B sum_i g_i / (|g_i| + stability) + sigma/B xi`. Long and short gradients weigh
nearly alike, so there is no clip to choose: the learning rate is all that is tuned.

Guarantee: the same as `tfdpx.mechanism`, since an example adds `|g| / (|g| + stability) / B < 1/B`.
"""

import math

import keras
import tensorflow as tf

from tfdpx._arguments import is_number, require
from tfdpx.per_example.rounding import SMALLEST_CLIP, UNIT
from tfdpx.training.clip_policy import ClipPolicy

AUTOMATIC = "automatic"
_STABILITY = 0.01
# A root, a sum, two quotients and the product with a gradient are rounded, each by at most UNIT.
_ROUNDED = 1.0 - 8 * UNIT


@keras.saving.register_keras_serializable(package="tfdpx")
class AutomaticClip(ClipPolicy):
    """What `l2_norm_clip="automatic"` is; its `l2_norm_clip` is 1, the bound on an example.

    Args:
        stability: Float >= 1e-9. Gradients far shorter than it count by their length, and not by
            their direction alone.

    Raises:
        ValueError: If `stability` is out of range.
    """

    def __init__(self, stability: float = _STABILITY) -> None:
        super().__init__(1.0)
        fits = is_number(stability) and SMALLEST_CLIP <= stability < math.inf
        require(fits, "stability", stability, f"be a finite float >= {SMALLEST_CLIP}")
        self.stability = float(stability)

    def factors(self, squared_norms, present, batch_size, *clips):
        """float32 [n]: `1 / (B (norm + stability))`, and less by what is rounded."""
        return _ROUNDED / (tf.sqrt(squared_norms) + self.stability) / float(batch_size)

    def arguments(self) -> dict:
        """`l2_norm_clip`, as the word where it says all."""
        return {"l2_norm_clip": AUTOMATIC} if self.stability == _STABILITY else super().arguments()

    def get_config(self) -> dict:
        """Arguments of the constructor."""
        return {"stability": self.stability}

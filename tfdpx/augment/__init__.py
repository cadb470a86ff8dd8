"""Augmentation multiplicity: K views of each example, made on the device.

An augmentation draws its random choices for the whole logical batch at once and applies them to any
part of it. So the views do not depend on `microbatch_size`, and (seed, step) replays them.

Reference: De et al. 2022 (arXiv:2204.13650), section 3.1.
"""

from tfdpx import _keras as _keras  # First: it reports a Keras with another backend.
from tfdpx.augment.crops import RandomCropFlip, ResizeCropFlip
from tfdpx.augment.layer_views import LayerViews
from tfdpx.augment.mix_views import MixViews

__all__ = ["LayerViews", "MixViews", "RandomCropFlip", "ResizeCropFlip"]

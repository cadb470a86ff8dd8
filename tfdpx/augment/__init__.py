"""Augmentation multiplicity: K views of each example, made on the device.

An augmentation draws its random choices for the whole logical batch at once and applies them to any
part of it. So the views do not depend on `microbatch_size`, and (seed, step) replays them.

Reference: De et al. 2022 (arXiv:2204.13650), section 3.1.
"""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.augment.crops import RandomCropFlip, ResizeCropFlip
from tfdpx.augment.each_alone import OwnViews
from tfdpx.augment.layer_views import LayerViews, get
from tfdpx.augment.mix_views import MixViews


def is_own(augment):
    """Whether `augment` is of this package, and no subclass of a user's: it treats images alone."""
    if type(augment) is MixViews:
        return is_own(augment.augment)
    return type(augment) in (LayerViews, RandomCropFlip, ResizeCropFlip)


__all__ = ["LayerViews", "MixViews", "OwnViews", "RandomCropFlip", "ResizeCropFlip", "get"]

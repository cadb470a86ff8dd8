"""Augmentation multiplicity: each update uses K random views (augmented copies) of each example.

An augmentation first draws the random choices for the whole batch, and then applies them to parts
of the batch. The views therefore do not depend on `microbatch_size`, and the same seed gives the
same views.

Reference: De et al. 2022 (arXiv:2204.13650), section 3.1.
"""

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.
from tfdpx.augment.crops import RandomCropFlip, ResizeCropFlip
from tfdpx.augment.layer_views import LayerViews
from tfdpx.augment.mix_views import MixViews

__all__ = ["LayerViews", "MixViews", "RandomCropFlip", "ResizeCropFlip"]

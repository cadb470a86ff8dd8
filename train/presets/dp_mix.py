"""CIFAR-10 from random weights, WRN-16-4 that also sees mixtures of an image's views.

    python -m tfdpx.train.classify --preset=dp_mix/eps8 --download --workdir=/runs/dp_mix

Bao, Pittaluga, Kumar & Bindschaedler 2023, "DP-Mix: Mixup-based Data Augmentation for
Differentially Private Learning" (arXiv:2311.01295), DP-Mix_Self. Test accuracy (paper) at epsilon
8: 79.8%. Hours: not measured.

All values are our choice: network, batch size, updates, learning rate and clip are those of the
preset `tan`, 16 views of an image are joined by 18 mixtures of two of them, with weights from
Beta(0.2, 0.2), and the noise is solved for.
"""

from tfdpx.train.presets import tan

COMMON = dict(tan.COMMON, augmult=34, augment_mix=18, augment_mix_alpha=0.2, microbatch_size=32)

COLUMNS = {
    "eps8": dict(epsilon=8.0, learning_rate=4.0, steps=2500),
}

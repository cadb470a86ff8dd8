r"""CIFAR-10, fine-tuning a WRN-16-4 from images that know no data, after Tang et al.

    python -m experiments.free_features.pretrain --dataset=cifar10 --model=wrn_16_4 \
        --relu_first --no_weight_standardization --workdir=/runs/pretrained
    python -m tfdpx.train.classify --preset=randp/eps1 --init_from=/runs/pretrained/model.keras \
        --download --workdir=/runs/fine_tuned

Tang, Panda, Sehwag & Mittal 2023, "Differentially Private Image Classification by Learning Priors
from Random Processes" (arXiv:2306.06076), DP-RandP. Test accuracy (paper) at epsilon 1: 72.3%.
Hours: not measured.

Batch size, noise, updates, learning rate, clip, views and network are those of the authors'
published code. They spend 0.98 by PLD, and 1.07 by RDP. The authors learn from images of a StyleGAN
of random weights, for which other images stand here. The first 8 epochs of the 875 updates train
the last layer alone. Their network also has biases, and normalizes what its 1x1 projections see;
ours has not. `microbatch_size` is ours.
"""

from tfdpx.train.presets import tan

COMMON = dict(tan.COMMON, pretrained_on="synthetic", trainable="all")

COLUMNS = {
    "eps1": dict(
        learning_rate=0.4, noise_multiplier=9.3, steps=875, head_steps=96, head_learning_rate=15.0
    ),
}

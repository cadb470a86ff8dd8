"""CIFAR-10 from random weights, WRN-16-4 with ReLU before each normalization, after Sander et al.

    python -m tfdpx.train.classify --preset=tan/eps8 --download --workdir=/runs/tan

Sander, Stock & Sablayrolles 2023, "TAN Without a Burn: Scaling Laws of DP-SGD" (arXiv:2210.03403).
Test accuracy (paper) at epsilon 8: 78.1%. Hours: not measured.

Batch size, noise, updates, learning rate, clip, views, the order of the layers, plain convolutions
and the average of the weights are those of the authors' published code, for the run that it calls
one of epsilon 8. On 50,000 images it spends less: 7.10 by RDP and 6.58 by PLD. `--epsilon=8` lowers
the noise. Their network also has biases, and normalizes what its 1x1 projections see; ours has not.
`microbatch_size` is ours.
"""

from tfdpx.train.presets import table12

COMMON = dict(table12.COMMON, relu_first=True, weight_standardization=False)

COLUMNS = {
    "eps8": dict(learning_rate=4.0, noise_multiplier=3.0, steps=2500),
}

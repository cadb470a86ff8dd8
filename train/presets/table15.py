r"""Table 15: CIFAR-10, fine-tuning all layers of a WRN-28-10 from ImageNet-32.

    python -m tfdpx.train.classify --preset=table15/eps1 --init_from=/runs/pretrained/model.keras \
        --download --workdir=/runs/fine_tuned

`tfdpx.train.pretrain --recipe=imagenet32` makes that model. Test accuracy (paper) at epsilon 1, 2,
4, 8: 94.8, 95.4, 96.1, 96.6%. Hours: not measured.

The column of epsilon 4 spends 3.714 by PLD, the accountant of the presets, and 4.020 by RDP, the
paper's (`--accountant=rdp`).
"""

from tfdpx.train.presets import table12

COMMON = dict(
    table12.COMMON,
    model="wrn_28_10",
    pretrained_on="imagenet32",
    trainable="all",
    batch_size=16384,
    learning_rate=1.0,
    microbatch_size=16,
)

COLUMNS = {
    "eps1": dict(noise_multiplier=21.1, steps=250),
    "eps2": dict(noise_multiplier=15.8, steps=500),
    "eps4": dict(noise_multiplier=12.0, steps=1000),
    "eps8": dict(noise_multiplier=9.4, steps=2000),
}

r"""Table 19: CIFAR-10, fine-tuning all layers of a WRN-40-4 from CIFAR-100.

    python -m tfdpx.train.classify --preset=table19/eps1 --init_from=/runs/pretrained/model.keras \
        --download --workdir=/runs/fine_tuned

`tfdpx.train.pretrain --recipe=cifar100` makes that model. Test accuracy (paper) at epsilon 0.5, 1,
1.5, 2, 4, 6, 8: 76.7, 80.4, 83.8, 84.9, 87.0, 88.4, 89.0%. Hours: not measured.

The paper does not say so, but only with 45,000 training images are these the epsilons it gives.
"""

from tfdpx.train.presets import table12

COMMON = dict(
    table12.COMMON,
    validation=0.1,
    eval_split="test",
    model="wrn_40_4",
    pretrained_on="cifar100",
    trainable="all",
    microbatch_size=32,
)

COLUMNS = {
    "eps0.5": dict(batch_size=1024, learning_rate=0.125, noise_multiplier=5.0, steps=781),
    "eps1": dict(learning_rate=1.0, noise_multiplier=5.0, steps=164),
    "eps1.5": dict(learning_rate=0.3, noise_multiplier=6.0, steps=531),
    "eps2": dict(learning_rate=0.3, noise_multiplier=6.0, steps=906),
    "eps4": dict(learning_rate=0.3, noise_multiplier=5.0, steps=2171),
    "eps6": dict(learning_rate=0.1, noise_multiplier=6.0, steps=6421),
    "eps8": dict(learning_rate=0.1, noise_multiplier=5.0, steps=7226),
}

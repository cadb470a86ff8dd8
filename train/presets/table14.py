"""Table 14: ImageNet from random weights, NF-ResNet-50 at 224 pixels.

    python -m tfdpx.train.classify --preset=table14/eps8 --data_dir=/data --workdir=/runs/nf_resnet

Accuracy (paper): 32.4%, and 55.8% among the first five. Hours: not measured.

10,000 images of the training set are never trained on (Table 11); accuracy is that on the official
validation images, which the paper calls its test set.
"""

# What all experiments on ImageNet share.
IMAGENET = dict(
    dataset="imagenet2012",
    validation=10_000,
    eval_split="test",
    center_crop=True,
    delta=8e-7,
    batch_size=16384,
    l2_norm_clip=1.0,
    ema_momentum=0.99999,
    report_every=500,
)

COMMON = dict(
    IMAGENET,
    image_size=224,
    model="nf_resnet_50",
    augmult=4,
    augment_resize=1.2,
    augment_flip=True,
    microbatch_size=16,
)

COLUMNS = {
    "eps8": dict(learning_rate=4.0, noise_multiplier=2.5, steps=71_589),
}

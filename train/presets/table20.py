"""Table 20: ImageNet, fine-tuning the last layer of an NF-ResNet-200 from JFT-300M at 320 pixels.

JFT-300M is not public: give a model trained on something else with --init_from. As in Table 14,
10,000 training images are held out and accuracy is that on the official validation images.
"""

COMMON = dict(
    dataset="imagenet2012",
    validation=10_000,
    eval_split="test",
    image_size=320,
    model="nf_resnet_200",
    pretrained_on="jft",
    trainable="last",
    delta=8e-7,
    batch_size=16384,
    learning_rate=0.4,
    l2_norm_clip=1.0,
    ema_momentum=0.99999,
    microbatch_size=64,
    report_every=500,
)

COLUMNS = {
    "eps0.5": dict(noise_multiplier=12.7, steps=12_500),
    "eps1": dict(noise_multiplier=9.4, steps=25_000),
    "eps2": dict(noise_multiplier=7.0, steps=50_000),
    "eps4": dict(noise_multiplier=5.3, steps=100_000),
    "eps8": dict(noise_multiplier=4.0, steps=193_318),
}

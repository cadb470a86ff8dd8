r"""Table 20: ImageNet, fine-tuning the last layer of an NF-ResNet-200 from JFT-300M at 320 pixels.

    python -m tfdpx.train.classify --preset=table20/eps8 --init_from=/runs/pretrained/model.keras \
        --data_dir=/data --workdir=/runs/fine_tuned

JFT-300M is not public: give a model trained on something else. With it, accuracy (paper) at epsilon
1, 2, 4, 8: 77.1, 78.9, 80.2, 81.1%. Hours: not measured.

As in Table 14, 10,000 training images are held out and accuracy is that on the official validation
images.
"""

from tfdpx.train.presets import table14

COMMON = dict(
    table14.IMAGENET,
    image_size=320,
    model="nf_resnet_200",
    pretrained_on="jft",
    trainable="last",
    learning_rate=0.4,
    microbatch_size=64,
)

COLUMNS = {
    "eps0.5": dict(noise_multiplier=12.7, steps=12_500),
    "eps1": dict(noise_multiplier=9.4, steps=25_000),
    "eps2": dict(noise_multiplier=7.0, steps=50_000),
    "eps4": dict(noise_multiplier=5.3, steps=100_000),
    "eps8": dict(noise_multiplier=4.0, steps=193_318),
}

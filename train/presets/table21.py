r"""Table 21: Places-365, fine-tuning an NF-ResNet-50 from JFT-300M at 256 pixels.

    python -m tfdpx.train.classify --preset=table21/all_eps8 --workdir=/runs/fine_tuned \
        --init_from=/runs/pretrained/model.keras --data_dir=/data

JFT-300M is not public: give a model trained on something else. With it, accuracy (paper) of
all_eps8, last_eps8, all_inf, last_inf: 54.6, 53.3, 57.3, 54.4%. Hours: not measured.

The columns of infinite epsilon neither clip nor add noise. Labels are smoothed by 0.1 in all
(section 4.3: 0.9 for the true label), though appendix C.3 says that no run with DP-SGD has that.
"""

COMMON = dict(
    dataset="places365_small",
    image_size=256,
    center_crop=True,
    model="nf_resnet_50",
    pretrained_on="jft",
    delta=5e-7,
    label_smoothing=0.1,
    ema_momentum=0.99999,
    microbatch_size=32,
    report_every=500,
)

_PRIVATE = dict(batch_size=4096, l2_norm_clip=1.0, learning_rate=0.1)
_NOT_PRIVATE = dict(private=False, batch_size=1024)

COLUMNS = {
    "all_eps8": dict(_PRIVATE, trainable="all", noise_multiplier=1.0, steps=223_939),
    "last_eps8": dict(_PRIVATE, trainable="last", noise_multiplier=2.0, steps=1_374_116),
    "all_inf": dict(_NOT_PRIVATE, trainable="all", learning_rate=0.3, steps=8_250),
    "last_inf": dict(_NOT_PRIVATE, trainable="last", learning_rate=0.1, steps=46_500),
}

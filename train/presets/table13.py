"""Table 13: CIFAR-10 from random weights, WRN-40-4; else as Table 12.

    python -m tfdpx.train.classify --preset=table13/eps8 --download --workdir=/runs/wrn

Test accuracy (paper) at epsilon 1, 2, 3, 4, 6, 8: 56.4, 65.9, 70.7, 73.5, 78.8, 81.4%. Hours: not
measured.
"""

from tfdpx.train.presets import table12

COMMON = dict(table12.COMMON, model="wrn_40_4", batch_size=16384, augmult=32, microbatch_size=16)

COLUMNS = {
    "eps1": dict(learning_rate=2.0, noise_multiplier=40.0, steps=906),
    "eps2": dict(learning_rate=2.0, noise_multiplier=24.0, steps=1156),
    "eps3": dict(learning_rate=2.0, noise_multiplier=20.0, steps=1656),
    "eps4": dict(learning_rate=2.0, noise_multiplier=16.0, steps=1765),
    "eps6": dict(learning_rate=4.0, noise_multiplier=12.0, steps=2007),
    "eps8": dict(learning_rate=4.0, noise_multiplier=9.4, steps=2000),
}

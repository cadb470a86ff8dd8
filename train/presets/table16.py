r"""Table 16: CIFAR-10, fine-tuning the last layer of a WRN-28-10 from ImageNet-32.

    python -m tfdpx.train.classify --preset=table16/eps1 --init_from=/runs/pretrained/model.keras \
        --download --workdir=/runs/fine_tuned

`tfdpx.train.pretrain --recipe=imagenet32` makes that model. Test accuracy (paper) at epsilon 1, 2,
4, 8: 93.1, 93.6, 94.0, 94.2%. Hours: not measured.

Else as Table 15. The column of epsilon 4 spends 3.714 by PLD, the accountant of the presets, and
4.020 by RDP, the paper's (`--accountant=rdp`).
"""

from tfdpx.train.presets import table15

COMMON = dict(table15.COMMON, trainable="last", learning_rate=4.0)

COLUMNS = table15.COLUMNS

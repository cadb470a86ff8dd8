r"""Table 17: CIFAR-100, fine-tuning all layers of a WRN-28-10 from ImageNet-32.

    python -m tfdpx.train.classify --preset=table17/eps1 --init_from=/runs/pretrained/model.keras \
        --download --workdir=/runs/fine_tuned

`tfdpx.train.pretrain --recipe=imagenet32` makes that model. Test accuracy (paper) at epsilon 1, 2,
4, 8: 67.4, 74.7, 79.2, 81.8%. Hours: not measured.

Else as Table 15. The column of epsilon 4 spends 3.714 by PLD, the accountant of the presets, and
4.020 by RDP, the paper's (`--accountant=rdp`).
"""

from tfdpx.train.presets import table15

COMMON = dict(table15.COMMON, dataset="cifar100")

COLUMNS = table15.COLUMNS

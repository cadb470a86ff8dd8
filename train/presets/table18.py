r"""Table 18: CIFAR-100, fine-tuning the last layer of a WRN-28-10 from ImageNet-32.

    python -m tfdpx.train.classify --preset=table18/eps1 --init_from=/runs/pretrained/model.keras \
        --download --workdir=/runs/fine_tuned

`tfdpx.train.pretrain --recipe=imagenet32` makes that model. Test accuracy (paper) at epsilon 1, 2,
4, 8: 70.3, 73.9, 76.1, 77.6%. Hours: not measured.

Else as Table 16. The column of epsilon 4 spends 3.714 by PLD, the accountant of the presets, and
4.020 by RDP, the paper's (`--accountant=rdp`).
"""

from tfdpx.train.presets import table16

COMMON = dict(table16.COMMON, dataset="cifar100")

COLUMNS = table16.COLUMNS

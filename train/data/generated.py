"""Images of `tfdpx.synthetic` to pre-train on: no data set is read for them."""

import numpy as np

from tfdpx import synthetic
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.train.data import datasets, loading

KINDS = {
    "strokes": synthetic.Strokes,
    "dead_leaves": synthetic.DeadLeaves,
    "shapes": synthetic.Shapes,
    "spectrum": synthetic.Spectrum,
}


def generate(settings, seed):
    """Images in the format of a data set, of which only the table of known ones is looked at.

    Args:
        settings: A `pretraining.Pretraining` with a `generator`.
        seed: Int >= 0.

    Returns:
        A `loading.ImageData`: `num_images` images with their own number as the label, and none to
        measure on. Shape, normalization and classes are the data set's, all of them constants.

    Raises:
        UserError: If the shape of the data set's images is not known without reading it.
    """
    entry = datasets.Name.parse(settings.dataset).entry
    size = settings.image_size
    shape = (size, size, entry.image_shape[2]) if size else entry.image_shape
    if None in shape:
        raise UserError(
            f"The size of the images of {settings.dataset!r} is not known without reading it: give "
            f"--image_size. Received: --dataset={settings.dataset}, no --image_size."
        )
    with checking_flags():
        generator = KINDS[settings.generator](shape[:2], shape[2], seed=seed)
    images = np.empty([settings.num_images, *shape], "uint8")
    for i in range(settings.num_images):  # One by one: as floats they are four times as large.
        images[i] = np.rint(255 * generator.images(1, i)[0])
    return loading.ImageData(
        name=f"synthetic:{settings.generator}",
        train_x=images,
        train_y=np.arange(settings.num_images),
        eval_x=images[:0],
        eval_y=np.arange(0),
        num_train=settings.num_images,
        image_shape=shape,
        eval_split=None,
        class_names=tuple(map(str, range(entry.num_classes or 2))),
        centre=entry.centre,
        deviation=entry.deviation,
    )

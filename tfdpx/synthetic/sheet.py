"""Images of several generators in one picture, to look at."""

import numpy as np
import tensorflow as tf

from tfdpx._arguments import check_positive_integer, require

_GAP = 2


def contact_sheet(generators, path, columns=12, enlarge=1):
    """Writes the first images of each generator into a PNG file, one row a generator.

    Args:
        generators: List of `tfdpx.synthetic` generators of 1 or 3 channels, of one image size.
        path: File to write.
        columns: Positive int, images of each.
        enlarge: Positive int, how many pixels of the picture a pixel of an image is wide and high.

    Raises:
        ValueError: If there is no generator, or their sizes differ, or an argument does not fit.
    """
    check_positive_integer("columns", columns)
    check_positive_integer("enlarge", enlarge)
    sizes = [generator.image_size for generator in generators]
    require(sizes, "generators", generators, "hold a generator at least")
    must = "have one image size"
    require(len(set(sizes)) == 1, "generators", sizes, must, " Write a sheet for each size.")
    channels = {generator.channels for generator in generators}
    must = "have 1 or 3 channels: a picture shows no other"
    require(channels <= {1, 3}, "generators", sorted(channels), must)
    rows = []
    for generator in generators:
        images = generator.images(columns).repeat(enlarge, axis=1).repeat(enlarge, axis=2)
        images = np.broadcast_to(images, [*images.shape[:3], 3])
        gaps = [(0, 0), (0, _GAP), (0, _GAP), (0, 0)]
        rows.append(np.concatenate(np.pad(images, gaps, constant_values=1), axis=1))
    picture = np.concatenate(rows)[:-_GAP, :-_GAP]
    tf.io.write_file(str(path), tf.io.encode_png(np.rint(255 * picture).astype("uint8")))

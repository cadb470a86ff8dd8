"""Private linear classifiers on fixed features, for example on the output of a frozen backbone.

Each head reads precomputed features, and adds noise to a few statistics of them instead of to many
small batches ("Differentially Private Image Classification from Features"; `AdaMix` comes
from "Mixed Differential Privacy in Computer Vision"):

    head                 releases                                       noise grows with classes
    `LeastSquares`       a matrix for all, one and a sum for each class  no
    `FeatureCovariance`  a matrix for all, `steps` gradients             no
    `Newton`             `steps` gradients, and a Hessian for each class by the root of their number
    `FirstOrder`         `steps` gradients                              no
    `AdaMix`             `steps` gradients, helped by public examples   no

    head = tfdpx.heads.FeatureCovariance(num_classes=10, epsilon=1.0, delta=1e-5, steps=10)
    head.noise_multiplier                  # available before any data are read
    head.fit(features, labels)             # arrays, or a tf.data.Dataset of (features, labels)
    model = keras.Sequential([backbone, head.to_layer()])
"""

from tfdpx import _keras as _keras  # First: it reports a Keras with another backend.
from tfdpx.heads.adamix import AdaMix
from tfdpx.heads.gradients import FirstOrder
from tfdpx.heads.moments import FeatureCovariance, LeastSquares, Newton

__all__ = ["AdaMix", "FeatureCovariance", "FirstOrder", "LeastSquares", "Newton"]

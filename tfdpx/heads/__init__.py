"""Private linear classifiers ("heads") on fixed features, such as the output of a frozen backbone.

A head computes a few statistics of all examples and adds noise to them, whereas DP-SGD adds noise
to the gradients of many small batches. `AdaMix` is from "Mixed Differential Privacy in Computer
Vision", and the other heads are from "Differentially Private Image Classification from Features".
Each head releases these statistics with noise:

    `LeastSquares`       a matrix of all examples; for each class, a matrix and a sum
    `FeatureCovariance`  a matrix of all examples; `steps` gradients
    `Newton`             `steps` times a gradient, and a Hessian for each class. The noise grows
                         with the square root of the number of classes
    `FirstOrder`         `steps` gradients
    `AdaMix`             `steps` gradients, clipped and projected with the help of public examples

    head = tfdpx.heads.FeatureCovariance(num_classes=10, epsilon=1.0, delta=1e-5, steps=10)
    head.noise_multiplier                  # available before any data are read
    head.fit(features, labels)             # arrays, or a tf.data.Dataset of (features, labels)
    model = keras.Sequential([backbone, head.to_layer()])
"""

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.
from tfdpx.heads.adamix import AdaMix
from tfdpx.heads.gradients import FirstOrder
from tfdpx.heads.moments import FeatureCovariance, LeastSquares, Newton

__all__ = ["AdaMix", "FeatureCovariance", "FirstOrder", "LeastSquares", "Newton"]

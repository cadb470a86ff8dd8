"""What stands on top of a convolutional network, and how its weights start."""

import keras


def gaussian():
    """Returns a Gaussian initializer of variance 1/fan_in, a new one for each call."""
    return keras.initializers.VarianceScaling(1.0, "fan_in", "untruncated_normal")


def pooled_logits(x, num_classes):
    """Adds global average pooling and a dense layer to `x` [batch, height, width, channels]."""
    return logits(keras.layers.GlobalAveragePooling2D(name="pool")(x), num_classes)


def logits(x, num_classes):
    """Adds a dense layer to `x` [batch, features].

    Logits keep the precision of the weights under mixed precision: the loss loses digits on 16-bit
    ones.
    """
    dtype = keras.config.dtype_policy().variable_dtype
    return keras.layers.Dense(
        num_classes, kernel_initializer=gaussian(), dtype=dtype, name="logits"
    )(x)

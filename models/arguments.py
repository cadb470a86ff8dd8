"""Checks of the arguments that every image classifier takes."""


def check_positive_integer(name, value):
    """Raises ValueError unless `value`, the argument called `name`, is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Argument `{name}` must be a positive integer. Received: {name}={value}.")


def check_image_shape(input_shape, known=False):
    """Raises ValueError unless `input_shape` is `(height, width, channels)`.

    Height and width may be None, for images of any size, unless they must be `known`.
    """
    if len(input_shape) != 3 or input_shape[-1] is None:
        raise ValueError(
            "Argument `input_shape` must be (height, width, channels), without the batch axis and "
            f"with a known number of channels. Received: input_shape={input_shape}. "
            "Use, e.g., (32, 32, 3); for images without a channel axis, add one of size 1."
        )
    if known and None in input_shape:
        raise ValueError(
            "Argument `input_shape` must give the height and width, which the dense layer depends "
            f"on. Received: input_shape={input_shape}. Use, e.g., (28, 28, 1)."
        )

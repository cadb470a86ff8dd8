from tfdpx.train.data import loading
from tfdpx.train.data.loading import ImageData  # noqa
from tfdpx.train.data.public_split import split as public_split  # noqa

_P = "x"


def inputs(data):
    return {
        "image_shape": list(data.image_shape),
        "class_names": list(data.class_names),
        "centre": data.centre,
        "deviation": data.deviation,
        "preparation": _P,
    }


def load(*a, center_crop=False, **k):
    return loading.load(*a, **k)


def load_for(*a):
    return loading.load_for(*a)

"""Support for KerasHub's models; KerasHub is an optional dependency, so it is not imported."""

import keras
import tensorflow as tf

_PREPROCESSING = "keras_hub>PipelineModel"


def preprocessing_class(model):
    """Returns the KerasHub class whose `fit` preprocesses each batch; None for other models.

    Args:
        model: A `keras.Model`.
    """
    named = (
        c for c in type(model).__mro__ if keras.saving.get_registered_name(c) == _PREPROCESSING
    )
    return next(named, None)


def preprocess(model, arguments):
    """Preprocesses all data in the arguments of a `fit`, so a plan can draw examples from the data.

    Args:
        model: A model of KerasHub.
        arguments: Dict by name, the arguments of `fit`. The function changes the dict.

    Returns:
        Bool, whether `keras.Model.fit` can take the changed arguments. `fit` cannot if `x` is a
        data set that KerasHub has to preprocess.

    Raises:
        ValueError: If a string packs several texts with end tokens between them, and there are no
            `user_ids`.
    """
    if getattr(model, "preprocessor", None) is None:
        return True
    if isinstance(arguments.get("x"), tf.data.Dataset):
        return False
    names = ("x", "y", "sample_weight")
    if _is_held(arguments.get("x")):
        if arguments.get("user_ids") is None:
            _refuse_packed(model, arguments["x"])
        preprocessed = _preprocessed(model, [arguments.get(name) for name in names])
        arguments.update(zip(names, preprocessed, strict=True))
    validation = arguments.get("validation_data")
    if isinstance(validation, tuple | list):
        arguments["validation_data"] = _preprocessed(model, validation)
    elif isinstance(validation, tf.data.Dataset):
        arguments["validation_data"] = validation.map(model.preprocess_samples)
    return True


def _is_held(data):
    return isinstance(data, list | tuple | dict) or hasattr(data, "shape")


def _preprocessed(model, data):
    """Returns `(x, y, sample_weight)` from data that may be texts."""
    data = tf.nest.map_structure(_as_texts, tuple(data))
    return keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(*data))


def _refuse_packed(model, texts):
    end = getattr(getattr(model.preprocessor, "tokenizer", None), "end_token", None)
    for text in tf.nest.flatten(tf.nest.map_structure(_as_texts, texts)) if end else ():
        if isinstance(text, str) and sum(bool(part.strip()) for part in text.split(end)) > 1:
            raise ValueError(
                f"Argument `x` has several texts packed in one row, with the end token {end!r} "
                "between them, but a row is one example, even if its texts come from many people. "
                "Pass one text per row, or pack the texts of one person alone and pass `user_ids`."
            )


def _as_texts(leaf):
    """Converts an array of strings to a list, for tokenizers. Returns other leaves unchanged."""
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    return leaf.tolist() if kind in ("O", "S", "U", "T") else leaf

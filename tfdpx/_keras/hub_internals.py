"""Names of KerasHub, which need not be installed: nothing here imports it."""

import keras
import tensorflow as tf

_PREPROCESSING = "keras_hub>PipelineModel"


def preprocessing_class(model):
    """The class of KerasHub whose `fit` preprocesses batch by batch, or None.

    Args:
        model: A `keras.Model`.
    """
    named = (
        c for c in type(model).__mro__ if keras.saving.get_registered_name(c) == _PREPROCESSING
    )
    return next(named, None)


def preprocess(model, arguments):
    """Preprocesses what a `fit` was given, all at once, so that a plan can draw from it.

    Args:
        model: A model of KerasHub.
        arguments: Dict of the arguments of `fit` by name, which is changed.

    Returns:
        Bool: whether `keras.Model.fit` can take them. It cannot where `x` is a data set that
        KerasHub has to preprocess.

    Raises:
        ValueError: If a string holds several texts, and whose they are was not given.
    """
    if getattr(model, "preprocessor", None) is None:
        return True
    if isinstance(arguments.get("x"), tf.data.Dataset):
        return False
    names = ("x", "y", "sample_weight")
    if _is_held(arguments.get("x")):
        if arguments.get("user_ids") is None:
            _refuse_packed(model, arguments["x"])
        made = _preprocessed(model, [arguments.get(name) for name in names])
        arguments.update(zip(names, made, strict=True))
    validation = arguments.get("validation_data")
    if isinstance(validation, tuple | list):
        arguments["validation_data"] = _preprocessed(model, validation)
    elif isinstance(validation, tf.data.Dataset):
        arguments["validation_data"] = validation.map(model.preprocess_samples)
    return True


def _is_held(data):
    return isinstance(data, list | tuple | dict) or hasattr(data, "shape")


def _preprocessed(model, data):
    """`(x, y, sample_weight)` of what may be texts."""
    data = tf.nest.map_structure(_as_texts, tuple(data))
    return keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(*data))


def _refuse_packed(model, texts):
    end = getattr(getattr(model.preprocessor, "tokenizer", None), "end_token", None)
    for text in tf.nest.flatten(tf.nest.map_structure(_as_texts, texts)) if end else ():
        if isinstance(text, str) and sum(bool(part.strip()) for part in text.split(end)) > 1:
            raise ValueError(
                f"Argument `x` has several texts packed in one row, with the end token {end!r} "
                "between them: such a row is one example, whosever texts are in it. Give one text "
                "a row, or pack the texts of one person alone and give `user_ids`."
            )


def _as_texts(leaf):
    """Arrays of strings as lists, which tokenizers take; anything else as it is."""
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    return leaf.tolist() if kind in ("O", "S", "U", "T") else leaf

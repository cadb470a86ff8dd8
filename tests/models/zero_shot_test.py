"""A classifier from the names of its classes, with a small text encoder that is built here."""

import keras
import numpy as np
import pytest

import tfdpx

NAMES = ["round dark", "round light", "square dark"]
# Two units for the shape, two for the shade: the embedding holds the meaning of the words.
MEANING = dict(zip(("round", "square", "dark", "light"), np.eye(4), strict=True))


def encoder():
    words = keras.layers.TextVectorization(output_mode="int", vocabulary=list(MEANING))
    table = np.array([MEANING.get(word, np.zeros(4)) for word in words.get_vocabulary()])
    embedding = keras.layers.Embedding(*table.shape, weights=[table])
    inputs = keras.Input([], dtype="string")
    return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(embedding(words(inputs))))


def test_columns_are_the_names_at_norm_100():
    kernel = tfdpx.models.zero_shot_head(encoder(), NAMES)
    assert kernel.shape == (4, 3) and kernel.dtype == np.float32
    expected = 100 / np.sqrt(2) * np.array([[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]]).T
    np.testing.assert_allclose(kernel, expected, rtol=1e-5)
    prompted = tfdpx.models.zero_shot_head(encoder(), NAMES, scale=1, template="photo of a {}.")
    np.testing.assert_allclose(100 * prompted, kernel, rtol=1e-5)

    def preprocessor(texts):
        return [ord(text) % 4 for text in texts]

    tokens = tfdpx.models.zero_shot_head(
        np.eye(4).__getitem__, ["a", "b"], preprocessor=preprocessor
    )
    np.testing.assert_array_equal(tokens, 100 * np.eye(4)[:, 1:3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(class_names="round"), "`class_names` must be a sequence"),
        (dict(class_names=["round", "round"]), "all different"),
        (dict(scale=0), "`scale` must be a positive"),
        (dict(template="photo"), "`template` must hold"),
        (dict(class_names=["round", "unheard of"]), "also for .'unheard of'"),
        (dict(text_encoder=lambda texts: np.ones([3])), r"must return embeddings \[3, d\]"),
    ],
)
def test_unfit_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdpx.models.zero_shot_head(
            **{"text_encoder": encoder(), "class_names": NAMES, **arguments}
        )

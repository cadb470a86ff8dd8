"""A classifier from the names of its classes, by a small text encoder that is made here."""

import keras
import numpy as np
import pytest

import tfdpx

NAMES = ["round dark", "round light", "square dark"]
# Two units for the shape, two for the shade: what the words mean is in the embedding.
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


def test_adamix_starts_from_the_names_alone():
    kernel = tfdpx.models.zero_shot_head(encoder(), NAMES, scale=10)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)  # Images at norm one, in the space of the texts.
    x = kernel.T[y] / 10 * np.sqrt(2) + 0.4 * rng.normal(size=(60, 4))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")
    settings = dict(l2_norm_clip=0.5, steps=3, seed=1, learning_rate=0.5)
    head = tfdpx.heads.AdaMix(3, initial_weights=kernel, **settings).fit(x, y)
    # Three steps of the rate, each as long as the sum of clipped gradients and its noise at most.
    assert np.linalg.norm(head.kernel - kernel) < np.linalg.norm(kernel)
    assert head.evaluate(x, y)["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(class_names="round"), "`class_names` must be a sequence"),
        (dict(class_names=["round", "round"]), "all different"),
        (dict(scale=0), "`scale` must be a positive"),
        (dict(template="photo"), "`template` must hold"),
        (dict(class_names=["round", "unheard of"]), "also for .'unheard of'"),
        (dict(text_encoder=lambda texts: np.ones([3])), r"must give embeddings \[3, d\]"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdpx.models.zero_shot_head(
            **{"text_encoder": encoder(), "class_names": NAMES, **arguments}
        )

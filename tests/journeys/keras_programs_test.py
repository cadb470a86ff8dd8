"""Seven programs after Keras's own documentation, private by another optimizer and a plan.

Each is a function of the optimizer. The differences from the tutorials are in
`docs/coming_from.md`. Two more replace `train_step`, and are refused with the remedy.
"""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import nightly, slow

import tfdpx

layers = keras.layers
RNG = np.random.default_rng(0)


def image_classification(optimizer, folder):
    """After https://keras.io/examples/vision/image_classification_from_scratch."""
    y = RNG.integers(0, 2, 64)
    x = RNG.integers(0, 128, (64, 32, 32, 3)).astype("uint8") + 100 * y[:, None, None, None]

    inputs = keras.Input(shape=(32, 32, 3))
    z = layers.RandomFlip("horizontal")(inputs)
    z = layers.RandomRotation(0.1)(z)
    z = layers.Rescaling(1.0 / 255)(z)
    z = layers.Conv2D(16, 3, strides=2, padding="same")(z)
    z = layers.GroupNormalization(8)(z)  # The tutorial has BatchNormalization.
    z = previous = layers.Activation("relu")(z)
    for size in (16, 32):
        z = layers.Activation("relu")(z)
        z = layers.SeparableConv2D(size, 3, padding="same")(z)
        z = layers.GroupNormalization(8)(z)
        z = layers.MaxPooling2D(3, strides=2, padding="same")(z)
        residual = layers.Conv2D(size, 1, strides=2, padding="same")(previous)
        z = previous = layers.add([z, residual])
    z = layers.GlobalAveragePooling2D()(z)
    z = layers.Dropout(0.25)(z)
    model = keras.Model(inputs, layers.Dense(1)(z))

    model.compile(
        optimizer=optimizer,
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="acc")],
    )
    callbacks = [keras.callbacks.ModelCheckpoint(f"{folder}/save_at_{{epoch}}.keras")]
    model.fit(x, y, epochs=2, batch_size=16, callbacks=callbacks, verbose=0)
    saved = keras.models.load_model(f"{folder}/save_at_2.keras")
    assert saved.predict(x[:1], verbose=0).shape == (1, 1)
    return model


def timeseries_transformer(optimizer, folder):
    """After https://keras.io/examples/timeseries/timeseries_classification_transformer."""
    y = RNG.integers(0, 2, 80)
    x = RNG.normal(size=(80, 24, 1)) + y[:, None, None]

    inputs = keras.Input(shape=(24, 1))
    z = inputs
    for _ in range(2):
        attended = layers.MultiHeadAttention(key_dim=8, num_heads=2, dropout=0.25)(z, z)
        attended = layers.Dropout(0.25)(attended)
        res = layers.LayerNormalization(epsilon=1e-6)(attended) + z
        fed = layers.Conv1D(4, kernel_size=1, activation="relu")(res)
        fed = layers.Conv1D(1, kernel_size=1)(layers.Dropout(0.25)(fed))
        z = layers.LayerNormalization(epsilon=1e-6)(fed) + res
    z = layers.GlobalAveragePooling1D(data_format="channels_last")(z)
    z = layers.Dropout(0.4)(layers.Dense(16, activation="relu")(z))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(z))

    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=optimizer,
        metrics=["sparse_categorical_accuracy"],
    )
    # The tutorial stops early by a `validation_split` of the private data.
    public = RNG.normal(size=(16, 24, 1)), RNG.integers(0, 2, 16)
    callbacks = [keras.callbacks.EarlyStopping(patience=10, restore_best_weights=True)]
    model.fit(x, y, validation_data=public, epochs=2, batch_size=16, callbacks=callbacks, verbose=0)
    model.evaluate(x, y, verbose=0)
    return model


def text_classification(optimizer, folder):
    """After https://keras.io/examples/nlp/text_classification_from_scratch."""
    words = ["good", "bad", "film", "plot", "the", "a"]
    texts = [" ".join(RNG.choice(words, 12)) for _ in range(64)]
    y = np.array(["good" in text for text in texts], "float32")
    # The tutorial adapts the vocabulary to the private texts.
    vectorize = layers.TextVectorization(output_sequence_length=12, vocabulary=words)
    x = vectorize(tf.constant(texts))

    inputs = keras.Input(shape=(None,), dtype="int64")
    z = layers.Embedding(len(words) + 2, 8)(inputs)
    z = layers.Dropout(0.5)(z)
    z = layers.Conv1D(8, 3, padding="valid", activation="relu", strides=2)(z)
    z = layers.GlobalMaxPooling1D()(z)
    z = layers.Dropout(0.5)(layers.Dense(8, activation="relu")(z))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid", name="predictions")(z))

    model.compile(loss="binary_crossentropy", optimizer=optimizer, metrics=["accuracy"])
    model.fit(x, y, epochs=2, batch_size=16, validation_split=0.25, verbose=0)
    text = keras.Input(shape=(1,), dtype="string")
    end_to_end = keras.Model(text, model(vectorize(text)))
    assert end_to_end.predict(tf.constant([["a good film"]]), verbose=0).shape == (1, 1)
    return model


def tabular(optimizer, folder):
    """After https://keras.io/examples/structured_data/imbalanced_classification."""
    x = RNG.normal(size=(200, 8)).astype("float32")
    y = (x[:, :1] > 1.2).astype("uint8")
    model = keras.Sequential(
        [
            keras.Input(shape=(8,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(16, activation="relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
    ]
    model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=metrics)
    model.fit(
        x,
        y,
        batch_size=50,
        epochs=2,
        verbose=0,
        callbacks=[keras.callbacks.ModelCheckpoint(f"{folder}/model_at_{{epoch}}.keras")],
        validation_data=(x[:20] + 1, y[:20]),
        class_weight={0: 1 / 180, 1: 1 / 20},
    )
    return model


def autoencoder(optimizer, folder):
    """After https://keras.io/examples/vision/autoencoder."""
    x = RNG.uniform(size=(64, 12, 12, 1)).astype("float32")
    noisy = np.clip(x + 0.4 * RNG.normal(size=x.shape), 0, 1)

    inputs = keras.Input(shape=(12, 12, 1))
    z = layers.Conv2D(8, 3, activation="relu", padding="same")(inputs)
    z = layers.MaxPooling2D(2, padding="same")(z)
    z = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(z)
    z = layers.Conv2D(1, 3, activation="sigmoid", padding="same")(z)
    model = keras.Model(inputs, z)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    for images in (x, noisy):
        model.fit(x=images, y=x, epochs=1, batch_size=16, shuffle=True, verbose=0)
    assert model.predict(noisy[:4], verbose=0).shape == (4, 12, 12, 1)
    return model


def segmentation(optimizer, folder):
    """After https://keras.io/examples/vision/oxford_pets_image_segmentation."""
    masks = RNG.integers(0, 3, (32, 16, 16, 1)).astype("uint8")
    images = (masks + RNG.normal(size=(32, 16, 16, 3))).astype("float32")

    inputs = keras.Input(shape=(16, 16, 3))
    z = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
    z = previous = layers.Activation("relu")(layers.GroupNormalization(4)(z))
    for size, transposed in ((16, False), (8, True)):
        conv = layers.Conv2DTranspose if transposed else layers.SeparableConv2D
        z = conv(size, 3, padding="same")(layers.Activation("relu")(z))
        z = layers.GroupNormalization(4)(z)
        if transposed:
            z, residual = layers.UpSampling2D(2)(z), layers.UpSampling2D(2)(previous)
            residual = layers.Conv2D(size, 1, padding="same")(residual)
        else:
            z = layers.MaxPooling2D(3, strides=2, padding="same")(z)
            residual = layers.Conv2D(size, 1, strides=2, padding="same")(previous)
        z = previous = layers.add([z, residual])
    z = layers.UpSampling2D(2)(z)
    model = keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(z))

    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    public = images[:8] + 3, masks[:8]
    callbacks = [keras.callbacks.ModelCheckpoint(f"{folder}/pets.keras", save_best_only=True)]
    model.fit(
        images,
        masks,
        epochs=2,
        batch_size=8,
        validation_data=public,
        callbacks=callbacks,
        verbose=0,
    )
    return model


def character_model(optimizer, folder):
    """After https://keras.io/examples/generative/lstm_character_level_text_generation."""
    text, length = "a slow brown fox sleeps and a quick dog jumps over it " * 3, 10
    chars = sorted(set(text))
    indices = np.array([chars.index(c) for c in text])
    starts = range(0, len(text) - length, 3)
    x = np.eye(len(chars), dtype="bool")[[indices[i : i + length] for i in starts]]
    y = np.eye(len(chars), dtype="bool")[[indices[i + length] for i in starts]]

    model = keras.Sequential(
        [
            keras.Input(shape=(length, len(chars))),
            layers.LSTM(16),
            layers.Dense(len(chars), activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer=optimizer)
    for _ in range(2):
        model.fit(x, y, batch_size=10, epochs=1, verbose=0)
        assert model.predict(x[:1], verbose=0).shape == (1, len(chars))
    return model


# Number of examples, batch size, epochs and optimizer of each program.
PROGRAMS = {
    image_classification: (64, 16, 2, keras.optimizers.Adam),
    timeseries_transformer: (80, 16, 2, keras.optimizers.Adam),
    text_classification: (48, 16, 2, keras.optimizers.Adam),
    tabular: (200, 50, 2, keras.optimizers.Adam),
    autoencoder: (64, 16, 2, keras.optimizers.Adam),
    segmentation: (32, 8, 2, keras.optimizers.Adam),
    character_model: (51, 10, 2, keras.optimizers.RMSprop),
}


# The callbacks of these programs act on validation metrics.
WITH_PUBLIC_VALIDATION = (timeseries_transformer, segmentation)


@pytest.mark.parametrize(
    "program",
    [
        tabular,
        *map(slow, (image_classification, text_classification)),
        *map(nightly, (timeseries_transformer, autoencoder, segmentation, character_model)),
    ],
    ids=lambda program: program.__name__,
)
@pytest.mark.filterwarnings("error:.*approximat")
def test_another_optimizer_and_a_plan_are_all_that_it_takes(program, tmp_path):
    num_examples, batch_size, epochs, optimizer = PROGRAMS[program]
    plan = tfdpx.PrivacyPlan(
        num_examples, batch_size, epochs=epochs, noise_multiplier=1.0, delta=1e-3
    )
    private = tfdpx.make_private(optimizer)(
        learning_rate=0.01, plan=plan, public_validation=program in WITH_PUBLIC_VALIDATION
    )
    model = program(private, tmp_path)
    ledger = model.optimizer.ledger
    assert ledger.steps == plan.steps and not ledger.is_approximate and ledger.is_complete
    assert ledger.epsilon(plan.delta) == plan.epsilon
    [way] = model.optimizer.independence
    assert way.startswith(("batched", "mapped"))


class VAE(keras.Model):
    """After https://keras.io/examples/generative/vae."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(2), layers.Dense(4)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(data - self.decoder(self.encoder(data))))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(loss)
        return {"loss": self.total_loss_tracker.result()}


class GAN(keras.Model):
    """After https://keras.io/examples/generative/dcgan_overriding_train_step."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = layers.Dense(1), layers.Dense(4)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, real_images):
        noise = tf.random.normal([tf.shape(real_images)[0], 3])
        for network, optimizer in (
            (self.discriminator, self.d_optimizer),
            (self.generator, self.g_optimizer),
        ):
            with tf.GradientTape() as tape:
                images = tf.concat([self.generator(noise), real_images], axis=0)
                predictions = self.discriminator(images)
                loss = self.loss_fn(tf.ones_like(predictions), predictions)
            gradients = tape.gradient(loss, network.trainable_weights)
            optimizer.apply_gradients(zip(gradients, network.trainable_weights, strict=True))
        return {"loss": loss}


IMAGES = RNG.normal(size=(64, 4)).astype("float32")


@pytest.mark.parametrize("make", [VAE, GAN])
def test_a_step_of_ones_own_is_refused_at_once_with_what_to_write_instead(make):
    model = make()
    plan = tfdpx.PrivacyPlan(64, batch_size=16, epochs=1, noise_multiplier=1.0, delta=1e-3)
    private = tfdpx.DPAdam(1e-3, plan=plan)
    if make is GAN:
        model.compile(private, keras.optimizers.Adam(), keras.losses.BinaryCrossentropy())
    else:
        model.compile(private)
    with pytest.raises(ValueError, match="(?s)`train_step`.*the loss by `compute_loss`"):
        model.fit(IMAGES, verbose=0)
    if make is VAE:  # Other doors.
        with pytest.raises(ValueError, match="overrides `train_step`"):
            model.train_on_batch(IMAGES[:16])
        with pytest.raises(ValueError, match="overrides `train_step`"):
            tfdpx.distributed.fit(model, plan, IMAGES)
    assert model.optimizer.iterations == 0 and private.iterations == 0


def test_negatives_of_triplets_are_not_called_weights_without_a_word():
    plan = tfdpx.PrivacyPlan(64, batch_size=16, epochs=1, noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(ValueError, match=r"`\(\(first, second"):
        plan.batches(tf.data.Dataset.from_tensor_slices((IMAGES, IMAGES, IMAGES)).batch(16))


@pytest.mark.slow
def test_a_loss_that_the_model_computes():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "coming_from.md").read_text("utf-8")
    example, names = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1], {}
    exec(compile(example, "coming_from.md", "exec"), names)
    model = names["model"]
    assert model.optimizer.ledger.steps == names["plan"].steps == 8
    assert all(way.startswith(("batched", "mapped")) for way in model.optimizer.independence)
    assert not model.optimizer.epsilon_is_approximate

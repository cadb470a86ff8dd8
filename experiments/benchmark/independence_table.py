r"""Which layers and models are proved to be batch independent, for docs/independence.md.

    python experiments/benchmark/independence_table.py --out=docs/independence_table.md

Each layer stands in a model of its own; all models are in training mode. The proof runs none of
them; layers are then trained for one update. `--only=NAME` shows one, with every reason.
"""

import argparse
import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdpx
from tfdpx import models
from tfdpx.independence import independence_of

layers = keras.layers
# A number of rows that no cutting of the batch into parts divides.
FEW = 5
# These cut large batches into parts, which is proved for few rows only.
IN_PARTS = ("tfdpx ScatterLinear", "tfdpx ScatterCNN")
# Cells that a loop runs, bases, and what wraps something or makes no batch of a batch.
LEFT_OUT = {
    *("AbstractRNNCell", "Equalization", "FlaxLayer", "GRUCell", "HashedCrossing", "InputLayer"),
    *(
        "JaxLayer",
        "LSTMCell",
        "Lambda",
        "Layer",
        "MaxNumBoundingBoxes",
        "Pipeline",
        "SimpleRNNCell",
    ),
    *("StackedRNNCells", "TFSMLayer", "TorchModuleWrapper", "Wrapper"),
}
_ABOUT = """Made by `python experiments/benchmark/independence_table.py`; [independence.md](independence.md) says
what it means. Each layer stands in a model of its own, in training mode. The column "trains" is of
one private update of that model, with a dense layer behind: what it was, or why it is refused."""
IMAGE, SERIES, VECTOR = (8, 8, 4), (6, 4), (4,)
VOLUME, TOKENS, FRAMES, PICTURE = (6, 6, 6, 4), (6,), (3, 8, 8, 4), (8, 8, 3)


def _layers():
    """`{name: (function that makes a layer, shapes of its inputs)}` of the layers of Keras."""
    on_images = [
        "AveragePooling2D",
        "BatchNormalization",
        "GlobalAveragePooling2D",
        "GlobalMaxPooling2D",
        "MaxPooling2D",
        "SpatialDropout2D",
        "UpSampling2D",
        "ZeroPadding2D",
    ]
    on_series = [
        "Activation",
        "AveragePooling1D",
        "Cropping1D",
        "GlobalAveragePooling1D",
        "GlobalMaxPooling1D",
        "MaxPooling1D",
        "SpatialDropout1D",
        "UpSampling1D",
        "ZeroPadding1D",
    ]
    on_volumes = [
        "AveragePooling3D",
        "Cropping3D",
        "GlobalAveragePooling3D",
        "GlobalMaxPooling3D",
        "MaxPooling3D",
        "SpatialDropout3D",
        "UpSampling3D",
        "ZeroPadding3D",
    ]
    on_vectors = [
        "ELU",
        "Flatten",
        "LayerNormalization",
        "LeakyReLU",
        "Masking",
        "PReLU",
        "RMSNormalization",
        "ReLU",
        "Softmax",
        "UnitNormalization",
        "Identity",
    ]
    arguments = {"Activation": ["gelu"]}
    arguments.update({f"AveragePooling{n}D": [2] for n in (1, 2, 3)})
    arguments.update({f"SpatialDropout{n}D": [0.2] for n in (1, 2, 3)})
    made = {}
    for names, shape in (
        (on_images, IMAGE),
        (on_series, SERIES),
        (on_volumes, VOLUME),
        (on_vectors, SERIES),
    ):
        for name in names:
            given = arguments.get(name, [])
            made[name] = (lambda n=name, a=given: getattr(layers, n)(*a), [shape])
    for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"):
        made[name] = (lambda n=name: getattr(layers, n)(), [SERIES, SERIES])
    for name in (
        *("AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization"),
        *("RandomColorJitter", "RandomElasticTransform", "RandomGaussianBlur", "RandomGrayscale"),
        *("RandomErasing", "RandomInvert", "RandomPerspective", "Solarization"),
    ):
        made[name] = (lambda n=name: getattr(layers, n)(), [PICTURE])
    for name in ("AugMix", "CutMix", "MixUp", "RandAugment"):
        made[name] = (lambda n=name: getattr(layers, n)(), [PICTURE])
    for name in ("RandomColorDegeneration", "RandomHue", "RandomSaturation", "RandomSharpness"):
        made[name] = (lambda n=name: getattr(layers, n)(0.5), [PICTURE])
    for n, shape in ((1, SERIES), (2, IMAGE), (3, VOLUME)):
        for kind in ("Average", "Max"):
            name = f"Adaptive{kind}Pooling{n}D"
            made[name] = (lambda n=name: getattr(layers, n)(2), [shape])
    cell = layers.LSTMCell
    made.update(
        {
            "ActivityRegularization": (lambda: layers.ActivityRegularization(0.1), [VECTOR]),
            "AdditiveAttention": (layers.AdditiveAttention, [SERIES, SERIES]),
            "AlphaDropout": (lambda: layers.AlphaDropout(0.2), [VECTOR]),
            "Attention": (layers.Attention, [SERIES, SERIES]),
            "BatchNormalization, frozen": (_frozen_batch_norm, [IMAGE]),
            "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(3)), [SERIES]),
            "CategoryEncoding": (lambda: layers.CategoryEncoding(5), [(3,), "int32"]),
            "Conv1D": (lambda: layers.Conv1D(3, 2), [SERIES]),
            "Conv1DTranspose": (lambda: layers.Conv1DTranspose(3, 2), [SERIES]),
            "Conv2D": (lambda: layers.Conv2D(3, 2, strides=2), [IMAGE]),
            "Conv2D, dilated": (lambda: layers.Conv2D(3, 2, dilation_rate=2), [IMAGE]),
            "Conv2D, in groups": (lambda: layers.Conv2D(4, 2, groups=2), [IMAGE]),
            "Conv2DTranspose": (lambda: layers.Conv2DTranspose(3, 2, strides=2), [IMAGE]),
            "Conv3D": (lambda: layers.Conv3D(3, 2), [VOLUME]),
            "Conv3DTranspose": (lambda: layers.Conv3DTranspose(3, 2), [VOLUME]),
            "ConvLSTM1D": (lambda: layers.ConvLSTM1D(2, 3), [(3, 8, 4)]),
            "ConvLSTM2D": (lambda: layers.ConvLSTM2D(2, 3), [FRAMES]),
            "ConvLSTM3D": (lambda: layers.ConvLSTM3D(2, 3), [(2, 6, 6, 6, 2)]),
            "Cropping2D": (lambda: layers.Cropping2D(1), [IMAGE]),
            "Dense": (lambda: layers.Dense(3), [SERIES]),
            "Dense, silu": (lambda: layers.Dense(3, "silu"), [VECTOR]),
            "DepthwiseConv1D": (lambda: layers.DepthwiseConv1D(2), [SERIES]),
            "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(2), [IMAGE]),
            "DepthwiseConv2D, dilated": (
                lambda: layers.DepthwiseConv2D(2, dilation_rate=2),
                [IMAGE],
            ),
            "Discretization": (lambda: layers.Discretization([0.0, 1.0]), [VECTOR]),
            "Dot": (lambda: layers.Dot(-1), [SERIES, SERIES]),
            "Dropout": (lambda: layers.Dropout(0.2), [SERIES]),
            "EinsumDense": (lambda: layers.EinsumDense("abc,cd->abd", (None, 3)), [SERIES]),
            "Embedding": (lambda: layers.Embedding(9, 3), [TOKENS, "int32"]),
            "GRU": (lambda: layers.GRU(3), [SERIES]),
            "GaussianDropout": (lambda: layers.GaussianDropout(0.2), [VECTOR]),
            "GaussianNoise": (lambda: layers.GaussianNoise(0.2), [VECTOR]),
            "GroupNormalization": (lambda: layers.GroupNormalization(2), [IMAGE]),
            "GroupQueryAttention": (
                lambda: layers.GroupQueryAttention(4, 4, 2),
                [SERIES, SERIES],
            ),
            "Hashing": (lambda: layers.Hashing(3), [(2,), "int32"]),
            "IntegerLookup": (lambda: layers.IntegerLookup(vocabulary=[0, 1]), [(2,), "int64"]),
            "IntegerLookup, of known ones alone": (
                lambda: layers.IntegerLookup(vocabulary=[0, 1], num_oov_indices=0),
                [(2,), "int64"],
            ),
            "LSTM": (lambda: layers.LSTM(3, dropout=0.1, recurrent_dropout=0.1), [SERIES]),
            "LSTM, unrolled": (lambda: layers.LSTM(3, unroll=True), [SERIES]),
            "MelSpectrogram": (lambda: layers.MelSpectrogram(16, 8, 16, num_mel_bins=4), [(64,)]),
            "MultiHeadAttention": (
                lambda: layers.MultiHeadAttention(2, 4, dropout=0.1),
                [SERIES, SERIES],
            ),
            "Normalization": (lambda: layers.Normalization(mean=0.5, variance=2.0), [VECTOR]),
            "Permute": (lambda: layers.Permute((2, 1)), [SERIES]),
            "RNN": (lambda: layers.RNN(cell(3)), [SERIES]),
            "RandomFlip": (layers.RandomFlip, [IMAGE]),
            "RandomRotation": (lambda: layers.RandomRotation(0.1), [IMAGE]),
            "RandomTranslation": (lambda: layers.RandomTranslation(0.1, 0.1), [IMAGE]),
            "RandomZoom": (lambda: layers.RandomZoom(0.1), [IMAGE]),
            "RandomPosterization": (lambda: layers.RandomPosterization(4), [PICTURE]),
            "RandomShear": (lambda: layers.RandomShear(0.1, 0.1), [PICTURE]),
            "ReversibleEmbedding": (lambda: layers.ReversibleEmbedding(9, 3), [TOKENS, "int32"]),
            "RandomContrast": (lambda: layers.RandomContrast(0.1), [IMAGE]),
            "RandomBrightness": (lambda: layers.RandomBrightness(0.1), [IMAGE]),
            "RandomCrop": (lambda: layers.RandomCrop(4, 4), [IMAGE]),
            "CenterCrop": (lambda: layers.CenterCrop(4, 4), [IMAGE]),
            "RepeatVector": (lambda: layers.RepeatVector(3), [VECTOR]),
            "Rescaling": (lambda: layers.Rescaling(0.1), [IMAGE]),
            "Reshape": (lambda: layers.Reshape((4, -1)), [SERIES]),
            "Resizing": (lambda: layers.Resizing(5, 5), [IMAGE]),
            "SeparableConv1D": (lambda: layers.SeparableConv1D(3, 2), [SERIES]),
            "SeparableConv2D": (lambda: layers.SeparableConv2D(3, 2), [IMAGE]),
            "SimpleRNN": (lambda: layers.SimpleRNN(3, return_sequences=True), [SERIES]),
            "SpectralNormalization": (
                lambda: layers.SpectralNormalization(layers.Dense(3)),
                [VECTOR],
            ),
            "StackedRNNCells": (
                lambda: layers.RNN(layers.StackedRNNCells([cell(3), cell(2)])),
                [SERIES],
            ),
            "STFTSpectrogram": (lambda: layers.STFTSpectrogram("log", 16, 8, 16), [(64, 1)]),
            "StringLookup": (lambda: layers.StringLookup(vocabulary=["a"]), [(2,), "string"]),
            "StringLookup, of known ones alone": (
                lambda: layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0),
                [(2,), "string"],
            ),
            "TextVectorization": (
                lambda: layers.TextVectorization(vocabulary=["a"], output_sequence_length=3),
                [(), "string"],
            ),
            "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dense(3)), [SERIES]),
        }
    )
    # Older versions of Keras lack some.
    return {name: value for name, value in made.items() if hasattr(layers, name.split(",")[0])}


def _frozen_batch_norm():
    layer = layers.BatchNormalization()
    layer.trainable = False
    return layer


def _of_layer(make, shapes):
    shapes, dtype = (shapes[:-1], shapes[-1]) if isinstance(shapes[-1], str) else (shapes, None)
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    outputs = make()(inputs[0] if len(inputs) == 1 else inputs)
    return keras.Model(inputs[0] if len(inputs) == 1 else inputs, outputs)


def _attention(name):
    made, shapes = _layers()[name]
    inputs = [keras.Input(shape) for shape in shapes]
    return keras.Model(inputs, made()(*inputs))


def vision_transformer(classes=10):
    """A small one, with a class token, learned positions and dropout."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Reshape((16, 16))(layers.Conv2D(16, 8, strides=8)(inputs))
    x = ClassToken()(x)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(y, y)
        y = layers.Dense(32, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(16)(layers.Dropout(0.1)(y))
    return keras.Model(inputs, layers.Dense(classes)(x[:, 0]))


class ClassToken(layers.Layer):
    """A learned vector before those of an image, and learned positions."""

    def build(self, shape):
        """Makes the token and the positions."""
        self.token = self.add_weight(shape=(1, 1, shape[-1]))
        self.positions = self.add_weight(shape=(1, shape[1] + 1, shape[-1]))

    def call(self, x):
        """[rows, n, width] as [rows, n + 1, width]."""
        shape = keras.ops.shape(x)
        token = keras.ops.broadcast_to(self.token, (shape[0], 1, shape[2]))
        return keras.ops.concatenate([token, x], axis=1) + self.positions


def text_classifier():
    """Tokens of any length, with a mask, through recurrent layers."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(20, 5, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GRU(3)(x)))


def models_of_all():
    """`{name: function that makes a model}`."""
    backbone = models.backbone
    made = {
        "tfdpx WideResNet(16, 4)": lambda: models.WideResNet(16, 4, 10),
        "tfdpx NFResNet(50)": lambda: models.NFResNet(50, 10, (64, 64, 3)),
        "tfdpx LeNet": lambda: _of_layer(lambda: models.LeNet(10), [(28, 28, 1)]),
        "tfdpx SmallCNN": lambda: models.SmallCNN(10, (8, 8, 1)),
        "tfdpx ScatterLinear": lambda: models.ScatterLinear(10, (8, 8, 1)),
        "tfdpx ScatterCNN": lambda: models.ScatterCNN(10, (32, 32, 3)),
        **{
            f"keras_cv {name}": lambda name=name: backbone(
                name, input_shape=(64, 64, 3), num_classes=10, batch_norm="freeze"
            )
            for name in ("resnet18", "resnet50_v2", "mit_b0")
        },
        **{
            f"keras.applications {name}": lambda name=name: backbone(
                name, input_shape=(64, 64, 3), num_classes=10, batch_norm="freeze"
            )
            for name in ("ConvNeXtTiny", "EfficientNetB0")
        },
        "bidirectional LSTM with a mask": text_classifier,
        "vision transformer": vision_transformer,
    }
    return made


def layers_of_keras():
    """`{name: function that makes a model with that layer}`."""
    made = {}
    for name, (make, shapes) in _layers().items():
        if name in ("MultiHeadAttention", "GroupQueryAttention"):
            made[name] = lambda name=name: _attention(name)
        else:
            made[name] = lambda make=make, shapes=shapes: _of_layer(make, shapes)
    return dict(sorted(made.items()))


def trained(model):
    """What one private update of a model says, with a dense layer behind: a text."""
    inputs = [keras.Input(t.shape[1:], dtype=t.dtype) for t in model.inputs]
    outputs = tf.nest.flatten(model(inputs[0] if len(inputs) == 1 else inputs))
    outputs = [keras.ops.cast(t, "float32") for t in outputs]
    means = [keras.ops.mean(t, axis=tuple(range(1, len(t.shape)))) for t in outputs]
    made = keras.Model(inputs, layers.Dense(2)(keras.ops.stack(means, axis=1)))
    optimizer = tfdpx.DPSGD(0.1, batch_size=FEW, noise_multiplier=1.0)
    made.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    rng = np.random.default_rng(0)

    def data(t):
        shape = (FEW, *t.shape[1:])
        if t.dtype == "string":
            return tf.constant(rng.choice(["a", "b"], shape))
        return rng.uniform(size=shape).astype(t.dtype)

    x = [data(t) for t in model.inputs]
    try:
        made.train_on_batch(x[0] if len(x) == 1 else x, np.zeros((FEW, 2), "float32"))
    except tfdpx.checks.UnfitForPrivacy as error:
        text = str(error).split("\n")
        return f"refused: {text[min(1, len(text) - 1)]}"
    return f"{optimizer.independence[0].verdict}"


def rows_of(found):
    """Lines of a table: one for each model, given what `looked_at` says of it."""
    for name, (every, few, trains) in found.items():
        reason = next(iter(every.reasons), "")
        cells = name, every.verdict, few.verdict, trains, reason
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def looked_at(made, trains):
    """`{name: (Independence for any number of rows, for few, what a training says)}`."""
    found = {}
    for number, (name, make) in enumerate(made.items(), 1):
        print(f"{number}/{len(made)} {name}", file=sys.stderr, flush=True)
        keras.backend.clear_session()
        model = make()
        found[name] = (
            independence_of(model),
            independence_of(model, rows=FEW),
            trained(model) if trains else "",
        )
    return found


def main():
    """Writes the table, and prints how many are proved as a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/independence_table.md")
    parser.add_argument("--only", default="", help="Part of a name; prints, and writes nothing.")
    arguments = parser.parse_args()
    kinds = {"models": models_of_all(), "layers": layers_of_keras()}
    found = {
        kind: looked_at(
            {name: make for name, make in made.items() if arguments.only in name}, kind == "layers"
        )
        for kind, made in kinds.items()
    }
    columns = (
        f"any number of rows | {FEW} rows | trains | why not proved |\n|---|---|---|---|---|\n"
    )
    text = "".join(
        f"## {kind.capitalize()}\n\n| {kind[:-1]} | {columns}"
        + "".join(f"{line}\n" for line in rows_of(of_kind))
        + "\n"
        for kind, of_kind in found.items()
    )
    if arguments.only:
        print(text)
        for of_kind in found.values():
            for name, (every, few, _) in of_kind.items():
                print(name, *every.reasons, *few.reasons, sep="\n  ")
    else:
        text = f"# What is proved to be batch independent\n\n{_ABOUT}\n\n{text.rstrip()}\n"
        pathlib.Path(arguments.out).write_text(text, encoding="utf-8")
    proved = {
        kind: sum(every.verdict == "proved" for every, *_ in of_kind.values())
        for kind, of_kind in found.items()
    }
    print(json.dumps({"proved": proved, "of": {k: len(v) for k, v in found.items()}}))


if __name__ == "__main__":
    main()

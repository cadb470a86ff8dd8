r"""Which layers and models are proved to be batch independent, for docs/independence.md.

    python -m experiments.benchmark.independence_table --out=docs/independence_table.md

Each layer stands in a model of its own; all models are in training mode. The proof runs none of
them; layers are then trained for one update. `--only=NAME` shows one, with every reason.
"""

import argparse
import json
import pathlib
import sys

import keras
import keras_cv
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
LEFT_OUT = set(
    "AbstractRNNCell Equalization FlaxLayer GRUCell HashedCrossing InputLayer JaxLayer LSTMCell "
    "Lambda Layer MaxNumBoundingBoxes Pipeline SimpleRNNCell StackedRNNCells TFSMLayer "
    "TorchModuleWrapper Wrapper".split()
)
_ABOUT = """Made by `python -m experiments.benchmark.independence_table`;
[independence.md](independence.md) says what it means. Each layer stands in a model of its own, in
training mode. The column "trains" is of one private update of that model, with a dense layer
behind: what it was, or why it is refused."""
IMAGE, SERIES, VECTOR = (8, 8, 4), (6, 4), (4,)
VOLUME, TOKENS, FRAMES, PICTURE = (6, 6, 6, 4), (6,), (3, 8, 8, 4), (8, 8, 3)


def _layers():
    """`{name: (function that makes a layer, shapes of its inputs)}` of the layers of Keras."""
    made = {}

    def add(names, shapes, *given, note="", **named):
        for name in names.split():
            if hasattr(layers, name):  # Older versions of Keras lack some.
                made[name + note] = (lambda n=name: getattr(layers, n)(*given, **named), shapes)

    for n, shape in ((1, SERIES), (2, IMAGE), (3, VOLUME)):
        add(f"MaxPooling{n}D UpSampling{n}D ZeroPadding{n}D", [shape])
        add(f"AveragePooling{n}D AdaptiveAveragePooling{n}D AdaptiveMaxPooling{n}D", [shape], 2)
        add(f"SpatialDropout{n}D", [shape], 0.2)
        add(f"Conv{n}D Conv{n}DTranspose", [shape], 3, 2, **({"strides": 2} if n == 2 else {}))
    add("Cropping1D GlobalAveragePooling1D GlobalMaxPooling1D", [SERIES])
    add("BatchNormalization GlobalAveragePooling2D GlobalMaxPooling2D RandomFlip", [IMAGE])
    add("Cropping3D GlobalAveragePooling3D GlobalMaxPooling3D", [VOLUME])
    add("ELU Flatten LayerNormalization LeakyReLU Masking PReLU RMSNormalization ReLU", [SERIES])
    add("Softmax UnitNormalization Identity", [SERIES])
    add("Add Average Concatenate Maximum Minimum Multiply Subtract", [SERIES, SERIES])
    add("AdditiveAttention Attention", [SERIES, SERIES])
    add("AutoContrast ContrastLimitedAdaptiveHistogramEqualization RandomColorJitter", [PICTURE])
    add("RandomElasticTransform RandomGaussianBlur RandomGrayscale RandomErasing", [PICTURE])
    add("RandomInvert RandomPerspective Solarization AugMix CutMix MixUp RandAugment", [PICTURE])
    add("RandomColorDegeneration RandomHue RandomSaturation RandomSharpness", [PICTURE], 0.5)
    add("RandomPosterization", [PICTURE], 4)
    add("RandomShear", [PICTURE], 0.1, 0.1)
    add("RandomRotation RandomZoom RandomContrast RandomBrightness Rescaling", [IMAGE], 0.1)
    add("RandomTranslation", [IMAGE], 0.1, 0.1)
    add("RandomCrop CenterCrop", [IMAGE], 4, 4)
    add("Resizing", [IMAGE], 5, 5)
    add("Reshape", [SERIES], (4, -1))
    add("Cropping2D", [IMAGE], 1)
    add("Conv2D", [IMAGE], 3, 2, dilation_rate=2, note=", dilated")
    add("Conv2D", [IMAGE], 4, 2, groups=2, note=", in groups")
    add("DepthwiseConv1D", [SERIES], 2)
    add("DepthwiseConv2D", [IMAGE], 2)
    add("DepthwiseConv2D", [IMAGE], 2, dilation_rate=2, note=", dilated")
    add("SeparableConv1D", [SERIES], 3, 2)
    add("SeparableConv2D", [IMAGE], 3, 2)
    add("ConvLSTM1D", [(3, 8, 4)], 2, 3)
    add("ConvLSTM2D", [FRAMES], 2, 3)
    add("ConvLSTM3D", [(2, 6, 6, 6, 2)], 2, 3)
    add("GroupNormalization", [IMAGE], 2)
    add("ActivityRegularization", [VECTOR], 0.1)
    add("AlphaDropout GaussianDropout GaussianNoise", [VECTOR], 0.2)
    add("Dropout", [SERIES], 0.2)
    add("Activation", [SERIES], "gelu")
    add("Dense", [SERIES], 3)
    add("Dense", [VECTOR], 3, "silu", note=", silu")
    add("EinsumDense", [SERIES], "abc,cd->abd", (None, 3))
    add("Dot", [SERIES, SERIES], -1)
    add("GroupQueryAttention", [SERIES, SERIES], 4, 4, 2)
    add("MultiHeadAttention", [SERIES, SERIES], 2, 4, dropout=0.1)
    add("Permute", [SERIES], (2, 1))
    add("RepeatVector", [VECTOR], 3)
    add("Normalization", [VECTOR], mean=0.5, variance=2.0)
    add("Discretization", [VECTOR], [0.0, 1.0])
    add("GRU", [SERIES], 3)
    add("LSTM", [SERIES], 3, dropout=0.1, recurrent_dropout=0.1)
    add("LSTM", [SERIES], 3, unroll=True, note=", unrolled")
    add("SimpleRNN", [SERIES], 3, return_sequences=True)
    add("Embedding ReversibleEmbedding", [TOKENS, "int32"], 9, 3)
    add("CategoryEncoding", [(3,), "int32"], 5)
    add("Hashing", [(2,), "int32"], 3)
    known = {"num_oov_indices": 0, "note": ", of known ones alone"}
    add("IntegerLookup", [(2,), "int64"], vocabulary=[0, 1])
    add("IntegerLookup", [(2,), "int64"], vocabulary=[0, 1], **known)
    add("StringLookup", [(2,), "string"], vocabulary=["a"])
    add("StringLookup", [(2,), "string"], vocabulary=["a", "b"], **known)
    add("TextVectorization", [(), "string"], vocabulary=["a"], output_sequence_length=3)
    add("MelSpectrogram", [(64,)], 16, 8, 16, num_mel_bins=4)
    add("STFTSpectrogram", [(64, 1)], "log", 16, 8, 16)
    cell, wrap = layers.LSTMCell, layers.StackedRNNCells
    made |= {  # Made of other layers, which each call makes anew.
        "BatchNormalization, frozen": (_frozen_batch_norm, [IMAGE]),
        "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(3)), [SERIES]),
        "RNN": (lambda: layers.RNN(cell(3)), [SERIES]),
        "SpectralNormalization": (
            lambda: layers.SpectralNormalization(layers.Dense(3)),
            [VECTOR],
        ),
        "StackedRNNCells": (lambda: layers.RNN(wrap([cell(3), cell(2)])), [SERIES]),
        "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dense(3)), [SERIES]),
    }
    return made


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


def _of_keras_cv():
    """`{name: function that makes a network}`, whose presets would be downloaded."""
    common = dict(input_shape=(64, 64, 3), include_rescaling=True)
    resnet = dict(stackwise_filters=[64, 128, 256, 512], stackwise_strides=[1, 2, 2, 2], **common)
    return {
        "resnet18": lambda: keras_cv.models.ResNetBackbone(
            stackwise_blocks=[2, 2, 2, 2], block_type="basic_block", **resnet
        ),
        "resnet50_v2": lambda: keras_cv.models.ResNetV2Backbone(
            stackwise_blocks=[3, 4, 6, 3], block_type="block", **resnet
        ),
        "mit_b0": lambda: keras_cv.models.MiTBackbone(
            depths=[2, 2, 2, 2], embedding_dims=[32, 64, 160, 256], **common
        ),
    }


def models_of_all():
    """`{name: function that makes a model}`."""
    made = {
        "tfdpx WideResNet(16, 4)": lambda: models.WideResNet(16, 4, 10),
        "tfdpx NFResNet(50)": lambda: models.NFResNet(50, 10, (64, 64, 3)),
        "tfdpx LeNet": lambda: _of_layer(lambda: models.LeNet(10), [(28, 28, 1)]),
        "tfdpx SmallCNN": lambda: models.SmallCNN(10, (8, 8, 1)),
        "tfdpx ScatterLinear": lambda: models.ScatterLinear(10, (8, 8, 1)),
        "tfdpx ScatterCNN": lambda: models.ScatterCNN(10, (32, 32, 3)),
        **{
            f"keras_cv {name}": lambda make=make: models.backbone(make())
            for name, make in _of_keras_cv().items()
        },
        **{
            f"keras.applications {name}": lambda name=name: models.backbone(name, 64, weights=None)
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

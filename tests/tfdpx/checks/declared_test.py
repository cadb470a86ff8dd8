"""The checks before the graph: attributes of the model, its class or instance, and its layers."""

import types

import keras
import pytest
import small
import tensorflow as tf

from tfdpx import checks

layers = keras.layers


def refused(model, match):
    with pytest.raises(checks.UnfitForPrivacy, match=match):
        model.fit(*small.data(), verbose=0)
    assert int(model.optimizer.iterations) == 0


def mixed(x):
    return 0.5 * (x + tf.reverse(x, [0]))


class Base:
    def train_step(self, data):
        return super().train_step((mixed(data[0]), data[1]))


class Derived(Base, keras.Sequential):
    pass


OWN = {
    "train_step": lambda model: lambda data: keras.Model.train_step(model, data),
    "train_function": lambda model: lambda iterator: model.train_step(next(iterator)),
    "make_train_function": lambda model: types.MethodType(keras.Model.make_train_function, model),
}


@pytest.mark.parametrize("method", [*OWN, "of a base class"])
def test_methods_that_see_the_batch_first_are_refused(method):
    model = small.model(layers=[layers.Dense(3)])
    if method in OWN:
        setattr(model, method, OWN[method](model))
        return refused(model, f"overrides `{method}`")
    derived = Derived(model.layers)
    derived.compile(optimizer=model.optimizer, loss=model.loss)
    refused(derived, "overrides `train_step`")


def test_float8_layers_are_refused_by_name():
    model = small.model(layers=[layers.Dense(3, name="head")])
    model.build((None, 6))
    optimizer, loss = model.optimizer, model.loss
    model.quantize("float8")
    model.compile(optimizer=optimizer, loss=loss)
    refused(model, "'head'.*float8")


def test_all_problems_are_listed_with_their_remedies():
    stack = [
        layers.SpectralNormalization(layers.Dense(4), name="spectral"),
        layers.Dense(3, activity_regularizer="l2", name="head"),
    ]
    model = keras.Sequential(stack)
    like = small.model()
    model.compile(optimizer=like.optimizer, loss=like.loss)
    with pytest.raises(checks.UnfitForPrivacy) as error:
        model.fit(*small.data(), verbose=0)
    wanted = [
        ("There are 2 problems:",),
        ("1. ", "'spectral'", "SpectralNormalization", "overwrites", "kernel_constraint"),
        ("2. ", "'head'", "without `activity_regularizer`"),
    ]
    lines = str(error.value).splitlines()
    assert len(lines) == len(wanted)
    for line, parts in zip(lines, wanted, strict=True):
        assert all(part in line for part in parts), line
    assert int(model.optimizer.iterations) == 0

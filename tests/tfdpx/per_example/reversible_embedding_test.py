"""`ReversibleEmbedding` against batches of one: tied or not, with a soft cap, called twice."""

import keras
import numpy as np
import oracle
import pytest
import seeds

from tfdpx.per_example import explain

layers = keras.layers
pytestmark = pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="A later version of Keras has it."
)
V, T, D = 7, 5, 4


def both(table, tokens):
    return table(layers.Dense(D, "tanh")(table(tokens)), reverse=True)


def twice(table, tokens):
    hidden = table(tokens) + layers.Dense(D, "tanh")(table(V - 1 - tokens))
    return table(hidden, reverse=True) + table(layers.Dense(D)(hidden), reverse=True)


def only_embeds(table, tokens):
    return layers.Dense(V)(table(tokens))


def only_gives_logits(table, tokens):
    table.build()
    return table(layers.Embedding(V, D)(tokens), reverse=True)


ARGUMENTS = [{"tie_weights": False}, {"logit_soft_cap": 2.0}]


def check(cases, views):
    """Compares a model of several tables and outputs with batches of one."""
    seeds.fix(1)
    tokens = keras.Input((T,), dtype="int32")
    tables = [layers.ReversibleEmbedding(V, D, **arguments) for _, arguments in cases]
    outputs = [calls(table, tokens) for (calls, _), table in zip(cases, tables, strict=True)]
    model = keras.Model(tokens, layers.Add()(outputs) if len(outputs) > 1 else outputs[0])
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(variable + rng.normal(scale=0.5, size=variable.shape))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = rng.integers(0, V, (2, 3 * views, T))
    names = {table.name for table in tables}
    rules = {choice.rule for choice in explain(model, x, views) if choice.layer in names}
    assert rules == {"ReversibleEmbeddingRule"}
    oracle.assert_matches_batches_of_one(model, x, y, views=views)


def test_a_tied_table():
    check([(both, {})], 1)


@pytest.mark.slow
def test_norms_and_sums():
    check([(twice, arguments) for arguments in ARGUMENTS], 2)
    check([(only_embeds, {}), (only_gives_logits, {})], 1)


class Doubled(getattr(layers, "ReversibleEmbedding", layers.Embedding)):
    def call(self, inputs, reverse=False):
        return 2 * super().call(inputs, reverse=reverse)


def test_a_subclass_with_a_call_of_its_own_is_served_by_the_generic_rule():
    table, tokens = Doubled(V, D), keras.Input((T,), dtype="int32")
    model = keras.Model(tokens, both(table, tokens))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.random.default_rng(0).integers(0, V, (2, 3, T))
    assert "GenericRule" in {choice.rule for choice in explain(model, x)}
    oracle.assert_matches_batches_of_one(model, x, y, norms=("auto",))

"""`ReversibleEmbedding` against batches of one: tied or not, with a soft cap, called twice."""

import keras
import pytest
from rule_cases import check_layers

layers = keras.layers
pytestmark = pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="A later version of Keras has it."
)
V, T, D = 7, 5, 4
ReversibleEmbedding = getattr(layers, "ReversibleEmbedding", layers.Embedding)


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


def rules_of(*cases, views=1, make=ReversibleEmbedding, **kwargs):
    """Compares a model of several tables with batches of one; returns the rules of the tables."""
    tables = [make(V, D, **arguments) for _, arguments in cases]
    rules = check_layers(
        [
            (lambda tokens, calls=calls, table=table: calls(table, tokens), (T,), V)
            for (calls, _), table in zip(cases, tables, strict=True)
        ],
        views,
        **kwargs,
    )
    return {rules[table.name] for table in tables}


def test_a_tied_table():
    assert rules_of((both, {})) == {"ReversibleEmbeddingRule"}


@pytest.mark.slow
def test_norms_and_sums():
    cases = [(twice, {"tie_weights": False}), (twice, {"logit_soft_cap": 2.0})]
    cases += [(only_embeds, {}), (only_gives_logits, {})]
    assert rules_of(*cases, views=2) == {"ReversibleEmbeddingRule"}


class Doubled(ReversibleEmbedding):
    def call(self, inputs, reverse=False):
        return 2 * super().call(inputs, reverse=reverse)


def test_a_subclass_with_a_call_of_its_own_is_served_by_the_generic_rule():
    assert rules_of((both, {}), make=Doubled, norms=("auto",)) == {"GenericRule"}

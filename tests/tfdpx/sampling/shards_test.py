"""The shares of all replicas form one batch: no example is taken twice, and none is lost."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpx
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import Examples
from tfdpx.sampling.shards import interleave_shards

STEPS, NUM_EXAMPLES = 8, 40
# Hosts and replicas.
CLUSTERS = [(1, 2), (2, 4)]
BOTH = pytest.mark.parametrize("kind", ["poisson", "shuffle"])


def plan(kind="poisson", batch_size=8):
    return tfdpx.PrivacyPlan(
        NUM_EXAMPLES, batch_size, STEPS, noise_multiplier=1.0, delta=1e-3, sampling=kind
    )


def context(hosts, replicas, host=0):
    return tf.distribute.InputContext(hosts, host, replicas)


def read(dataset, count):
    return [[part.numpy() for part in batch] for batch in dataset.take(count)]


def shares(kind, hosts, replicas, seed=5, start=0, batch_size=8):
    """Returns the parts of each step, by replica: [steps][replicas](x, y, weight)."""
    x, per_host = np.arange(NUM_EXAMPLES) + 1, replicas // hosts
    by_host = []
    for host in range(hosts):
        dataset = plan(kind, batch_size).batches(
            x, x % 3, seed=seed(host) if callable(seed) else seed, start=start,
            pad_to_multiple_of=replicas, input_context=context(hosts, replicas, host),
        )  # fmt: skip
        by_host.append(read(dataset, (STEPS - start) * per_host))
    return [
        [by_host[host][step * per_host + i] for host in range(hosts) for i in range(per_host)]
        for step in range(STEPS - start)
    ]


def taken(parts):
    return np.concatenate([x[weight > 0] for x, _, weight in parts])


@BOTH
@pytest.mark.parametrize("hosts, replicas", CLUSTERS)
def test_shares_are_dealt_evenly_from_the_batch_of_one_device(kind, hosts, replicas):
    x = np.arange(NUM_EXAMPLES) + 1
    whole = plan(kind).batches(x, x % 3, seed=5, pad_to_multiple_of=replicas)
    for parts, batch in zip(shares(kind, hosts, replicas), read(whole, STEPS), strict=True):
        assert len({part[0].shape for part in parts}) == 1
        for joined, wanted in zip(zip(*parts, strict=True), batch, strict=True):
            np.testing.assert_array_equal(np.stack(joined, axis=1).ravel(), wanted)
            dealt = interleave_shards(tf.constant(wanted), replicas)
            np.testing.assert_array_equal(np.concatenate(joined), dealt)
        assert len(set(taken(parts))) == len(taken(parts))
        counts = [np.count_nonzero(weight) for _, _, weight in parts]
        assert max(counts) == math.ceil(sum(counts) / replicas)
        assert min(counts) == sum(counts) // replicas


@pytest.mark.planted("a seed for each host")
def test_the_shares_of_hosts_with_seeds_of_their_own_take_examples_twice():
    # The bug that the test above must find.
    steps = shares("poisson", 4, 4, seed=lambda host: host, batch_size=30)
    assert any(len(set(taken(parts))) < len(taken(parts)) for parts in steps)


@BOTH
def test_resuming_goes_on_with_the_same_shares(kind):
    for one, other in zip(shares(kind, 2, 4)[3:], shares(kind, 2, 4, start=3), strict=True):
        np.testing.assert_array_equal(taken(one), taken(other))


@BOTH
def test_after_the_end_batches_hold_no_example(kind):
    x = np.arange(NUM_EXAMPLES) + 1
    dataset = plan(kind).batches(x, seed=5, input_context=context(1, 1))
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    after = [weight.numpy() for _, _, weight in dataset.skip(STEPS).take(3)]
    assert not np.any(after)


def operations(function_graph):
    definition = function_graph.as_graph_def()
    return {n.op for f in definition.library.function for n in f.node_def} | {
        n.op for n in definition.node
    }


def test_poisson_shares_need_no_python():
    # The hosts of a TPU pod run the dataset in processes without Python.
    @tf.function
    def count(start):
        dataset = sampled_batches.poisson_sampler(
            Examples(np.arange(9.0)), sampling_probability=0.5, capacity=9, steps=3,
            seed=1, start=0, input_context=context(1, 1),
        ).dataset()  # fmt: skip
        return dataset.take(2).reduce(start, lambda total, batch: total + 1)

    types = operations(count.get_concrete_function(tf.constant(0)).graph)
    assert "RangeDataset" in types and not {"PyFunc", "EagerPyFunc", "GeneratorDataset"} & types


def test_examples_in_order_come_once():
    examples = Examples(np.arange(10) + 1, np.arange(10))
    parts = [
        batch
        for host in range(2)
        for batch in read(
            sampled_batches.batches_in_order(
                examples, capacity=4, input_context=context(2, 2, host)
            ),
            3,
        )
    ]
    assert sorted(taken(parts)) == list(range(1, 11))
    assert {x.shape for x, _, _ in parts} == {(2,)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_context": context(1, 2)}, "Argument `seed` is required"),
        (
            {"input_context": context(1, 2), "seed": 0, "start": tf.Variable(0)},
            "`start` must be an int with an `input_context`",
        ),
        ({"input_context": context(2, 3), "seed": 0}, "3 replicas on 2 hosts"),
        ({"input_context": context(1, 7), "seed": 0}, "7 replicas.*Use 14 or 21"),
    ],
)
def test_unfit_arguments(arguments, message):
    examples = Examples(np.arange(20))
    with pytest.raises(ValueError, match=message):
        sampled_batches.poisson_sampler(
            examples, sampling_probability=0.5, capacity=20, steps=3, **arguments
        ).dataset()

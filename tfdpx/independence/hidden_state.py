"""State that a microbatch changes, looked for in its graph: wherever it is kept, it is written.

Keras' lists of variables miss a `tf.Variable`, an untracked `keras.Variable`, a metric, a table, a
queue. All of them are written by a stateful operation, here or in a function, loop or branch.
"""

import tensorflow as tf

from tfdpx._keras import layer_internals, tensorflow_internals

# Stateful operations that neither keep anything of a batch nor draw random numbers.
HARMLESS = frozenset(
    "Assert DebugIdentityV3 LookupTableFindV2 LookupTableSizeV2 Print PrintV2 ReadVariableOp "
    "ResourceGather ResourceGatherNd VarHandleOp VarIsInitializedOp VariableShape "
    # Their state is a mask of dropout, or a buffer that the backward pass reads.
    "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 "
    "CudnnRNNParamsSize CudnnRNNCanonicalToParamsV2".split()
)
# Where the inputs of a called function start among those of the operation; others are not followed.
CALLS = {
    **dict.fromkeys(["PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile"], 0),
    **dict.fromkeys(["If", "StatelessIf", "Case", "StatelessCase"], 1),
}


def start_of(operation):
    """The number of inputs in front of those of the function that an operation calls, or None."""
    called = tensorflow_internals.is_function(operation.graph, operation.type)
    return 0 if called else CALLS.get(operation.type)


# What types of operations begin with that draw random numbers.
RANDOM = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "Rng",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)


class Found:
    """Names of operations of a graph that keep something, draw random numbers or run Python.

    Args:
        graph: A `tf.Graph`.
        layer: The `keras.Layer` whose variables are known by name, or None.
        allowed: List of `keras.Variable`s that may be written.
        harmless: Prefixes of the types of more operations that are no state.
    """

    def __init__(self, graph, layer, allowed, harmless=()):
        paths = {} if layer is None else _paths(layer)
        permitted = {id(handle) for v in allowed for handle in layer_internals.handles(v)}
        self.written, self.drawn, self.python = [], [], []
        for name, operation, resources in _stateful(graph):
            if operation.type in HARMLESS or operation.type.startswith(harmless):
                continue
            if operation.type == "Empty" and operation.get_attr("init"):
                continue  # Zeros.
            if "PyFunc" in operation.type:
                self.python.append(name)
            elif operation.type.startswith(RANDOM):
                self.drawn.append(name)
            elif not resources or any(id(r) not in permitted for r in resources):
                names = [paths[id(r)] for r in resources if id(r) in paths]
                self.written.extend(names or [f"{name} ({operation.type})"])

    def problems(self, what):
        """Texts, naming variables, or operations where they are none of the layer's.

        Args:
            what: Str, what the graph is.
        """
        if self.python:
            yield (
                f"{what} runs Python inside the graph: {self.python}. What that keeps or mixes "
                "cannot be checked. Write it with TensorFlow's or Keras' operations."
            )
        if self.drawn:
            yield (
                f"{what} draws random numbers outside of any keras.random.SeedGenerator: "
                f"{self.drawn}. They must be secret, as the noise is. Give random layers an "
                "attribute `seed_generator = keras.random.SeedGenerator()`, as Keras' "
                "own have, and draw from that."
            )
        if self.written:
            yield (
                f"{what} changes state: {sorted(set(self.written))}. What it takes from the data "
                "would stay without noise. Do not assign to variables, metrics, tables or queues "
                "in training, and replace layers that do (BatchNormalization: "
                "`tfdpx.layers.replace_batch_norm(model)`)."
            )


def _paths(model):
    """`{id of a resource: path}` of everything that Keras knows of."""
    return {
        id(handle): v.path
        for v in [*model.variables, *model.metrics_variables]
        for handle in layer_internals.handles(v)
    }


def _stateful(graph, outer=None, path=""):
    """Triples (name, operation, its resource inputs) of a graph and all functions that it calls.

    Args:
        graph: A `tf.Graph` of a function.
        outer: `{id of an input: resource}`; by default what the graph captured.
        path: The operation that calls the function.
    """
    if outer is None:
        outer = {id(inner): captured for captured, inner in graph.captures}
    for operation in graph.get_operations():
        resources = [outer.get(id(t)) for t in operation.inputs if t.dtype == tf.resource]
        functions = [body for _, body in tensorflow_internals.called(operation)]
        start, name = start_of(operation), f"{path}{operation.name}"
        if operation.type == "Identity":
            outer[id(operation.outputs[0])] = outer.get(id(operation.inputs[0]))
        elif functions and start is not None:
            passed = [outer.get(id(t)) for t in operation.inputs[start:]]
            for body in functions:
                inner = dict(zip(map(id, body.inputs), passed, strict=True))
                yield from _stateful(body, inner, f"{name}/")
        elif operation.op_def.is_stateful or resources or "PyFunc" in operation.type:
            yield name, operation, resources

"""State in the graphs of a step: what it changes without noise, and what of that it reads again.

Keras' lists of variables miss a `tf.Variable`, an untracked `keras.Variable`, a metric, a table, a
queue. All of them are written by a stateful operation, here or in a function, loop or branch.

Metrics are written by every step, without noise. A gradient that depends on one depends on the
examples of earlier updates, which no clipping bounds. So no graph that makes gradients reads one.
"""

import tensorflow as tf

from tfdpx import mechanism
from tfdpx._keras import layer_internals, metric_internals, tensorflow_internals
from tfdpx.checks.errors import UnfitForPrivacy
from tfdpx.per_example.rows import Outputs, Rows

# Stateful operations that neither keep anything of a batch nor draw random numbers.
_HARMLESS = frozenset(
    "Assert CheckNumerics CheckNumericsV2 DebugIdentityV3 LookupTableFindV2 LookupTableSizeV2 "
    "Print PrintV2 ReadVariableOp ResourceGather ResourceGatherNd VarHandleOp VarIsInitializedOp "
    "VariableShape "
    # Their state is a mask of dropout, or a buffer that the backward pass reads.
    "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 "
    "CudnnRNNParamsSize CudnnRNNCanonicalToParamsV2".split()
)
# Where the inputs of a called function start among those of the operation; others are not followed.
_CALLS = {
    **dict.fromkeys(["PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile"], 0),
    **dict.fromkeys(["If", "StatelessIf", "Case", "StatelessCase"], 1),
}


# What types of operations begin with that draw random numbers.
_RANDOM = (
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


class StatefulOperations:
    """Names of operations of a graph that keep something, draw random numbers or run Python.

    Args:
        graph: A `tf.Graph`.
        layer: The `keras.Layer` whose variables are known by name, or None.
        allowed: List of `keras.Variable`s that may be written.
        harmless: Prefixes of the types of more operations that are no state.
    """

    def __init__(self, graph, layer, allowed, harmless=()):
        paths = {} if layer is None else _paths_by_handle(layer)
        allowed_ids = {id(handle) for v in allowed for handle in layer_internals.handles(v)}
        self.writes, self.draws, self.python_calls = [], [], []
        for name, operation, resources, _ in _stateful_operations(graph):
            if operation.type in _HARMLESS or operation.type.startswith(harmless):
                continue
            if operation.type == "Empty" and operation.get_attr("init"):
                continue  # Zeros.
            if "PyFunc" in operation.type:
                self.python_calls.append(name)
            elif operation.type.startswith(_RANDOM):
                self.draws.append(name)
            elif not resources or any(id(r) not in allowed_ids for r in resources):
                names = [paths[id(r)] for r in resources if id(r) in paths]
                self.writes.extend(names or [f"{name} ({operation.type})"])

    def problems(self, subject):
        """Texts, naming variables, or operations where they are none of the layer's.

        Args:
            subject: Str, what the graph is.
        """
        if self.python_calls:
            yield (
                f"{subject} runs Python inside the graph: {self.python_calls}. What that keeps or "
                "mixes cannot be checked. Write it with TensorFlow's or Keras' operations."
            )
        if self.draws:
            yield (
                f"{subject} draws random numbers outside of any keras.random.SeedGenerator: "
                f"{self.draws}. They must be secret, as the noise is. Give random layers an "
                "attribute `seed_generator = keras.random.SeedGenerator()`, as Keras' "
                "own have, and draw from that."
            )
        if self.writes:
            yield (
                f"{subject} changes state: {sorted(set(self.writes))}. What it takes from the data "
                "would stay without noise. Do not assign to variables, metrics, tables or queues "
                "in training, and replace layers that do (BatchNormalization: "
                "`tfdpx.layers.replace_batch_norm(model)`)."
            )


def _paths_by_handle(model):
    """`{id of a resource: path}` of everything that Keras knows of."""
    return {
        id(handle): v.path
        for v in [*model.variables, *model.metrics_variables]
        for handle in layer_internals.handles(v)
    }


def _stateful_operations(graph, outer=None, path="", caller=None):
    """Yields the stateful operations of a graph and of all functions that it calls.

    Each comes with its name, its resource inputs, and the operation of the outermost graph that it
    belongs to: `(name, operation, resources, outermost)`.

    Args:
        graph: A `tf.Graph` of a function.
        outer: `{id of an input: resource}`; by default the captures of the graph.
        path: The names of the operations that call the function.
        caller: The outermost of them.
    """
    if outer is None:
        outermost = _Outermost()
        outer = {id(inner): outermost(captured) for captured, inner in graph.captures}
    for operation in graph.get_operations():
        resources = [outer.get(id(t)) for t in operation.inputs if t.dtype == tf.resource]
        functions = [body for _, body in tensorflow_internals.called(operation)]
        start, name = _first_operand(operation), f"{path}{operation.name}"
        if operation.type == "Identity":
            outer[id(operation.outputs[0])] = outer.get(id(operation.inputs[0]))
        elif functions and start is not None:
            operands = [outer.get(id(t)) for t in operation.inputs[start:]]
            for body in functions:
                inner = dict(zip(map(id, body.inputs), operands, strict=True))
                yield from _stateful_operations(body, inner, f"{name}/", caller or operation)
        elif operation.op_def.is_stateful or resources or "PyFunc" in operation.type:
            yield name, operation, resources, caller or operation


def _first_operand(operation):
    """The number of inputs in front of those of the function that an operation calls, or None."""
    is_function = tensorflow_internals.is_function(operation.graph, operation.type)
    return 0 if is_function else _CALLS.get(operation.type)


# Operations that end a run for some values of an example, and so tell that it was drawn.
_RAISING = (
    *("Assert", "CheckNumerics", "CheckNumericsV2", "Decode", "MatrixInverse", "MatrixLogarithm"),
    *("MatrixSolve", "MatrixSquareRoot", "ParseExample", "ParseSequence", "ParseSingle"),
    *("ParseTensor", "StringToNumber", "Lu", "SelfAdjointEig", "Eig"),
)


def problems_of_raising(graph, subject):
    """Texts of operations of a graph that end the run for some values of an example.

    Args:
        graph: `tf.Graph`.
        subject: Str, what the graph is.
    """
    names = [
        f"{operation.name} ({operation.type})"
        for operation in _all_operations(graph)
        if operation.type.startswith(_RAISING)
    ]
    if names:
        yield (
            f"{subject} runs operations that end the run for some values of one example, and so "
            f"tell that it was drawn: {names}. Do this to the data set before training, or use an "
            "operation that takes every value (`tf.linalg.pinv` for an inverse, a place for "
            "unknown words in `StringLookup`)."
        )


def _all_operations(graph):
    """The operations of a graph and of all functions that it calls."""
    for operation in graph.get_operations():
        yield operation
        for _, body in tensorflow_internals.called(operation):
            yield from _all_operations(body)


def problems_of_metrics(model, data, y_pred, rows, may_be_absent):
    """Texts of how metrics, computed and shown, change state that is not their own.

    Args:
        model: A compiled, built `keras.Model`.
        data: `(x, y, sample_weight)`, nests of tensors [rows, ...]; shapes and dtypes are read.
        y_pred: The model's output, a nest of symbolic tensors [rows, ...].
        rows: Int, or None for any number.
        may_be_absent: Bool, whether some of them may be.
    """
    inputs, predictions = Rows(data), Outputs(y_pred)

    def metrics(tensors, prediction_tensors, present=None):
        x, y, sample_weight = inputs.pack(tensors)
        y_pred = predictions.rebuild(prediction_tensors)
        metric_internals.compute_metrics(model, x, y, y_pred, sample_weight, present)
        model.get_metrics_result()

    specs = [
        [tf.TensorSpec([rows, *t.shape[1:]], t.dtype) for t in tensors]
        for tensors in (inputs.tensors, predictions.tensors)
    ]
    flags = [tf.TensorSpec([rows], tf.bool)] if may_be_absent else []
    graph = tf.function(metrics, autograph=False).get_concrete_function(*specs, *flags).graph
    # Reading a metric adds it up over the hosts.
    yield from StatefulOperations(graph, model, _metric_variables(model), ("Collective",)).problems(
        "`compute_metrics`"
    )


def _metric_variables(model):
    """The variables that a step assigns without noise, a list."""
    # A metric may have a weight as an attribute, which Keras then counts among its variables.
    other_ids = {id(v) for v in [*model.weights, *model.optimizer.variables]}
    return [v for v in model.metrics_variables if id(v) not in other_ids]


def check_metrics_unread(graph, model, subject, operations=None):
    """Raises UnfitForPrivacy if a graph reads a metric.

    Args:
        graph: `tf.Graph` of a function.
        model: The compiled `keras.Model`.
        subject: Str, what the graph is.
        operations: List of operations of `graph`; None for all.
    """
    paths = {id(h): v.path for v in _metric_variables(model) for h in layer_internals.handles(v)}
    operations = graph.get_operations() if operations is None else operations
    inputs = (t for operation in operations for t in operation.inputs if t.dtype == tf.resource)
    outermost = _Outermost()
    paths_read = {paths.get(id(outermost(tensor))) for tensor in inputs} - {None}
    if paths_read:
        raise UnfitForPrivacy(_describe_reads(subject, sorted(paths_read)))


def call_without_metrics(model, subject, function, subjects):
    """`function()`, which must not read a metric; in eager mode it is traced once, to see that.

    Args:
        model: The compiled `keras.Model`.
        subject: Str, what the function does.
        function: Python function without arguments.
        subjects: Set, to which `subject` is added.

    Raises:
        UnfitForPrivacy: If its operations read a metric.
    """
    if tf.executing_eagerly():
        if subject not in subjects:

            def discard_result():
                function()

            trace = tf.function(discard_result, autograph=False).get_concrete_function()
            check_metrics_unread(trace.graph, model, subject)
            subjects.add(subject)
        return function()
    graph = tf.compat.v1.get_default_graph()
    count = len(graph.get_operations())
    result = function()
    check_metrics_unread(graph, model, subject, graph.get_operations()[count:])
    return result


def check_update(graph, model):
    """Raises UnfitForPrivacy if weights get another value than by private gradients.

    Values that are assigned to weights, and to variables of the optimizer, follow from private
    gradients, from variables other than metrics and from constants alone. So no regulariser,
    constraint, schedule or optimizer reads the batch, nor a metric of former batches.

    Args:
        graph: `tf.Graph` of a whole step.
        model: The compiled `keras.Model`.
    """
    paths = {id(h): v.path for v in _metric_variables(model) for h in layer_internals.handles(v)}
    variables = [*model.variables, *model.optimizer.variables]
    handles = {id(h): v.path for v in variables for h in layer_internals.handles(v)}
    waiting, visited, outermost = [], set(), _Outermost()
    for _, operation, resources, outer in _stateful_operations(graph):
        if operation.type not in _HARMLESS and any(id(r) in handles for r in resources):
            waiting += outer.inputs
    while waiting:
        tensor = outermost(waiting.pop())
        if not tf.is_symbolic_tensor(tensor) or id(tensor) in visited:
            if id(tensor) in paths:
                raise UnfitForPrivacy(_describe_reads(_UPDATE, [paths[id(tensor)]]))
            continue
        visited.add(id(tensor))
        operation = tensor.op
        if operation.name.rpartition("/")[2].startswith(mechanism.MARK):
            continue
        if tensor.dtype != tf.resource and operation.type.startswith(_OF_DATA):
            raise UnfitForPrivacy(_describe_reads(_UPDATE, [tensor.name]))
        waiting += operation.inputs


_UPDATE = "The update of the weights, with regularisers, constraints and schedule,"
# Types of operations that give examples.
_OF_DATA = ("Iterator", "Optional", "Placeholder")


class _Outermost:
    """Follows captured tensors to the graph in which each was captured first.

    The captures of a graph are listed once: no graph may capture more while this is in use.
    """

    def __init__(self):
        self._captures = {}

    def __call__(self, tensor):
        while tf.is_symbolic_tensor(tensor):
            graph = tensor.graph
            if id(graph) not in self._captures:
                pairs = getattr(graph, "captures", ())
                self._captures[id(graph)] = {id(inner): outer for outer, inner in pairs}
            outer = self._captures[id(graph)].get(id(tensor))
            if outer is None:
                return tensor
            tensor = outer
        return tensor


def _describe_reads(subject, names):
    return (
        f"{subject} reads values of examples that no noise was added to: {names}. Metrics add up "
        "private examples, so what depends on one is not bounded by the clip. Use a number, or a "
        "variable that no training data changes."
    )

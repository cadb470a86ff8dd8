"""Finds state in the graphs of a step: where it changes without noise, and where it is read.

Keras's lists of variables do not contain all state. They miss, for example, a `tf.Variable`, an
untracked `keras.Variable`, a metric, a table or a queue. But all state is written by stateful
operations, so this module looks for these in a graph, and in its functions, loops and branches.

Every step writes metrics without noise. A gradient that depends on a metric depends on the examples
of earlier updates, and no clipping bounds their effect. So a graph that computes gradients must not
read a metric.
"""

import tensorflow as tf

from tfdpx import mechanism
from tfdpx._arguments import first_names
from tfdpx._keras import layer_internals, metric_internals, tensorflow_internals
from tfdpx.checks.errors import UnfitForPrivacy
from tfdpx.per_example.random_layers import BATCH_NORM_REMEDY
from tfdpx.per_example.rows import Outputs, Rows

# Stateful operations that neither keep anything of a batch nor draw random numbers.
_HARMLESS = frozenset(
    "Assert CheckNumerics CheckNumericsV2 DebugIdentityV3 LookupTableFindV2 LookupTableSizeV2 "
    "Print PrintV2 ReadVariableOp ResourceGather ResourceGatherNd VarHandleOp VarIsInitializedOp "
    "VariableShape "
    # The state of the following is a mask of dropout, or a buffer that the backward pass reads.
    "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 "
    "CudnnRNNParamsSize CudnnRNNCanonicalToParamsV2".split()
)
# Operations that call a function. The number is the index of the operation's input that is the
# first input of the function. Resources are not followed into functions of other operations.
_CALLS = {
    **dict.fromkeys(["PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile"], 0),
    **dict.fromkeys(["If", "StatelessIf", "Case", "StatelessCase"], 1),
}


# Prefixes of the types of operations that draw random numbers.
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


# Operations that fail for some values. A failure would reveal that such an example was drawn.
_RAISING = (
    *("Assert", "CheckNumerics", "CheckNumericsV2", "Decode", "MatrixInverse", "MatrixLogarithm"),
    *("MatrixSolve", "MatrixSquareRoot", "ParseExample", "ParseSequence", "ParseSingle"),
    *("ParseTensor", "StringToNumber", "Lu", "SelfAdjointEig", "Eig"),
)


# Texts of the problems of a graph. The fields are the graph's subject and its first names.
_PROBLEMS = {
    "python": (
        "{} runs Python inside the graph: {}. What that keeps or mixes cannot be checked. Write it "
        "with TensorFlow's or Keras' operations."
    ),
    "draws": (
        "{} draws random numbers outside of any keras.random.SeedGenerator: {}. They must be "
        "secret, as the noise is. Give random layers an attribute `seed_generator = "
        "keras.random.SeedGenerator()`, as Keras' own have, and draw from that."
    ),
    "writes": (
        "{} changes state: {}. This state would hold data without noise. Do not assign to "
        "variables, metrics, tables or queues in training. Replace layers that do "
        f"{BATCH_NORM_REMEDY}"
    ),
    "raises": (
        "{} has operations that fail for some values: {}. Such a failure would reveal that an "
        "example with these values was drawn. Do this to the data set before training, or use an "
        "operation that takes every value (`tf.linalg.pinv` for an inverse, a place for unknown "
        "words in `StringLookup`)."
    ),
    "reads": (
        "{} reads values of examples that no noise was added to: {}. Metrics add up private "
        "examples, so what depends on one is not bounded by the clip. Use a number, or a variable "
        "that no training data changes."
    ),
}


def problems_of_graph(graph, layer, subject, unread=(), metrics=None):
    """Yields texts about operations that keep state, draw random numbers, run Python, or may fail.

    Args:
        graph: A `tf.Graph` of a function.
        layer: The `keras.Layer` whose variables the texts name by their paths, or None.
        subject: Str, the name of the graph in the texts.
        unread: List of `keras.Variable`s that the graph may not read.
        metrics: For a graph that only computes metrics: the list of `keras.Variable`s that it may
            write. Such a graph may also have operations that raise errors, or that add up numbers
            from several hosts.
    """
    paths = {} if layer is None else _paths([*layer.variables, *layer.metrics_variables])
    unread, written = _paths(unread), _paths(metrics or ())
    raising, harmless = (_RAISING, ()) if metrics is None else ((), ("Collective",))
    names_by_problem = {problem: [] for problem in _PROBLEMS}
    for name, operation, resources, _ in _operations(graph):
        kind = operation.type
        names_by_problem["reads"] += [unread[id(r)] for r in resources if id(r) in unread]
        if kind.startswith(raising):
            names_by_problem["raises"].append(f"{operation.name} ({kind})")
        elif "PyFunc" in kind:
            names_by_problem["python"].append(name)
        elif not _keeps_state(operation, resources) or kind.startswith(harmless):
            continue
        elif kind.startswith(_RANDOM):
            names_by_problem["draws"].append(name)
        elif not resources or any(id(r) not in written for r in resources):
            names = [paths[id(r)] for r in resources if id(r) in paths]
            names_by_problem["writes"] += names or [f"{name} ({kind})"]
    for problem, names in names_by_problem.items():
        if names:
            yield _PROBLEMS[problem].format(subject, first_names(sorted(set(names))))


def _keeps_state(operation, resources):
    is_zeros = operation.type == "Empty" and operation.get_attr("init")
    is_stateful = operation.op_def.is_stateful or resources
    return is_stateful and not is_zeros and operation.type not in _HARMLESS


def _paths(variables):
    """Returns a dict from the id of each resource of `keras.Variable`s to the variable's path."""
    return {id(handle): v.path for v in variables for handle in layer_internals.handles(v)}


def _operations(graph, outer=None, path="", caller=None):
    """Yields the operations of a graph, and of the functions that it calls.

    Operations that call these functions are left out. Each item is `(name, operation, resources,
    outermost)`. The name includes the names of calling operations. `resources` are the operation's
    resource inputs, and `outermost` is the operation of the outermost graph that contains it.

    Args:
        graph: A `tf.Graph` of a function.
        outer: Dict from the id of an input of the graph to a resource. By default it holds the
            tensors that the graph captures.
        path: The names of the operations that call the function.
        caller: The outermost of these operations.
    """
    if outer is None:
        outermost = _Outermost()
        outer = {id(inner): outermost(captured) for captured, inner in graph.captures}
    for operation in graph.get_operations():
        resources = [outer.get(id(t)) for t in operation.inputs if t.dtype == tf.resource]
        functions = [body for _, body in tensorflow_internals.called(operation)]
        is_function = tensorflow_internals.is_function(graph, operation.type)
        start, name = 0 if is_function else _CALLS.get(operation.type), f"{path}{operation.name}"
        if operation.type == "Identity":
            outer[id(operation.outputs[0])] = outer.get(id(operation.inputs[0]))
        elif not functions or start is None:
            yield name, operation, resources, caller or operation
        for body in functions:
            operands = [] if start is None else [outer.get(id(t)) for t in operation.inputs[start:]]
            inner = dict(zip(map(id, body.inputs), operands, strict=start is not None))
            yield from _operations(body, inner, f"{name}/", caller or operation)


def problems_of_metrics(model, data, y_pred, rows, may_be_absent):
    """Yields an error message for each kind of state, except metrics, that metrics change.

    Args:
        model: A compiled, built `keras.Model`.
        data: `(x, y, sample_weight)`, nests of tensors [rows, ...]; only shapes and dtypes are
            read.
        y_pred: The model's output, a nest of symbolic tensors [rows, ...].
        rows: Int, the number of rows, or None for any number.
        may_be_absent: Bool, whether some rows may be padding.
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
    yield from problems_of_graph(graph, model, "`compute_metrics`", metrics=metric_variables(model))


def metric_variables(model):
    """Returns a list of the metrics' variables. A step assigns to these variables without noise."""
    # A metric may have a weight as an attribute, which Keras then counts among its variables.
    other_ids = {id(v) for v in [*model.weights, *model.optimizer.variables]}
    return [v for v in model.metrics_variables if id(v) not in other_ids]


def _check_metrics_unread(operations, model, subject):
    """Raises UnfitForPrivacy if one of a list of operations reads a metric."""
    paths, outermost = _paths(metric_variables(model)), _Outermost()
    inputs = (t for operation in operations for t in operation.inputs if t.dtype == tf.resource)
    paths_read = {paths.get(id(outermost(tensor))) for tensor in inputs} - {None}
    if paths_read:
        raise UnfitForPrivacy(_PROBLEMS["reads"].format(subject, sorted(paths_read)))


def call_without_metrics(model, subject, function, subjects):
    """Calls a function, which must not read a metric, and returns its result.

    In eager mode, the function is traced once for this check.

    Args:
        model: The compiled `keras.Model`.
        subject: Str, the first words of the error message, for example "The update".
        function: Python function without arguments.
        subjects: Set of str, the subjects that were already checked in eager mode. After a check in
            eager mode, `subject` is added.

    Raises:
        UnfitForPrivacy: If operations of `function` read a metric.
    """
    if tf.executing_eagerly():
        if subject not in subjects:

            def discard_result():
                function()

            trace = tf.function(discard_result, autograph=False).get_concrete_function()
            _check_metrics_unread(trace.graph.get_operations(), model, subject)
            subjects.add(subject)
        return function()
    graph = tf.compat.v1.get_default_graph()
    count = len(graph.get_operations())
    result = function()
    _check_metrics_unread(graph.get_operations()[count:], model, subject)
    return result


def check_update(graph, model):
    """Raises UnfitForPrivacy if the update of the weights reads data or metrics.

    Values that are assigned to weights, and to variables of the optimizer, may be computed only
    from private gradients, constants, and variables that are not metrics. So no regulariser,
    constraint, schedule or optimizer may read the batch, or a metric of earlier batches.

    Args:
        graph: `tf.Graph` of a whole step.
        model: The compiled `keras.Model`.
    """
    paths = _paths(metric_variables(model))
    assigned = _paths([*model.variables, *model.optimizer.variables])
    waiting, visited, outermost = [], set(), _Outermost()
    for _, operation, resources, outer in _operations(graph):
        if operation.type not in _HARMLESS and any(id(r) in assigned for r in resources):
            waiting += outer.inputs
    while waiting:
        tensor = outermost(waiting.pop())
        if not tf.is_symbolic_tensor(tensor) or id(tensor) in visited:
            if id(tensor) in paths:
                raise UnfitForPrivacy(_PROBLEMS["reads"].format(_UPDATE, [paths[id(tensor)]]))
            continue
        visited.add(id(tensor))
        operation = tensor.op
        if operation in mechanism.private_operations:
            continue
        if tensor.dtype != tf.resource and operation.type.startswith(_OF_DATA):
            raise UnfitForPrivacy(_PROBLEMS["reads"].format(_UPDATE, [tensor.name]))
        waiting += operation.inputs


_UPDATE = "The update of the weights, with regularisers, constraints and schedule,"
# Prefixes of the types of operations that yield examples.
_OF_DATA = ("Iterator", "Optional", "Placeholder")


class _Outermost:
    """Finds the original of a captured tensor, in the outermost graph.

    The graph of a function captures tensors of the graph around it. An object of this class follows
    such a tensor from graph to graph outwards. It lists the captures of each graph only once, so no
    graph may capture more tensors later.
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

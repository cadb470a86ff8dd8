"""How much memory a traced function takes at its peak, inferred from its graph.

A tensor lives from the operation that makes it to the last one that reads it; the peak is the
largest sum of bytes alive. TensorFlow's executor leaves the order of operations open: two are
walked, that in which they were made and that in which they become ready, and the worse one counts.
Workspaces inside kernels, fragmentation and what threads hold at once come on top.
"""

import collections
import heapq
import itertools

import tensorflow as tf

from tfdpx._keras import tensorflow_internals

# Operations whose output shares the memory of their input.
_ALIASES = frozenset(
    "Bitcast EnsureShape ExpandDims Identity IdentityN PreventGradient Reshape Squeeze "
    "StopGradient".split()
)
# Operations that put one more element into a list; it is their last input.
_APPENDS = frozenset(["TensorListPushBack", "TensorListSetItem"])
_LOOPS = frozenset(["While", "StatelessWhile"])


def peak_bytes(function):
    """The bytes that the tensors of `function` take at its peak, its arguments included.

    Variables are not counted: they exist whether or not the function runs. An axis whose length the
    graph does not know makes its tensor count as much as the largest input of its operation.

    Args:
        function: A `tf.types.experimental.ConcreteFunction`.

    Returns:
        Int.
    """
    return _peak(function.graph)


def _peak(graph):
    needed = _needed(graph)
    return max(_walk(graph, _ordered(needed, flag)) for flag in (True, False))


def _walk(graph, operations):
    """The peak in one order of the operations."""
    owners = _owners(operations)
    waiting = collections.Counter(owners[t.ref()] for op in operations for t in op.inputs)
    waiting.update(owners[t.ref()] for t in graph.outputs)
    sizes, alive, peak = {}, 0, 0
    for operation in operations:
        made = [t.ref() for t in operation.outputs if owners[t.ref()] == t.ref()]
        for tensor in made:
            sizes[tensor] = _size(tensor.deref(), owners, sizes)
            alive += sizes[tensor]
        inner = max((_peak(body) for body in _bodies(operation)), default=0)
        peak = max(peak, alive + inner)
        read = [owners[t.ref()] for t in operation.inputs]
        waiting.subtract(read)
        alive -= sum(sizes[tensor] for tensor in {*made, *read} if waiting[tensor] == 0)
    return peak


def _needed(graph):
    """The operations that the outputs and side effects depend on, in order of creation."""
    needed, found = set(), [t.op for t in graph.outputs] + list(graph.control_outputs)
    while found:
        operation = found.pop()
        if operation not in needed:
            needed.add(operation)
            found.extend(_before(operation))
    return [op for op in graph.get_operations() if op in needed]


def _ordered(operations, by_creation):
    """The operations, each after those it needs; among the ready ones the oldest goes first.

    Args:
        operations: List in order of creation, which a loop's gradient leaves out of order.
        by_creation: Whether age counts from creation, or else from when an operation became ready.
    """
    missing, followers = {}, collections.defaultdict(list)
    for operation in operations:
        before = _before(operation)
        missing[operation] = len(before)
        for other in before:
            followers[other].append(operation)
    created = {operation: age for age, operation in enumerate(operations)}
    later = itertools.count(len(operations))
    ready = [(created[op], op) for op in operations if not missing[op]]
    ordered = []
    while ready:
        ordered.append(heapq.heappop(ready)[1])
        for follower in followers[ordered[-1]]:
            missing[follower] -= 1
            if not missing[follower]:
                age = created[follower] if by_creation else next(later)
                heapq.heappush(ready, (age, follower))
    return ordered


def _before(operation):
    return {*(t.op for t in operation.inputs), *operation.control_inputs}


def _owners(operations):
    """`{tensor: the tensor whose memory it shares}`, keyed by reference."""
    owners = {}
    for operation in operations:
        shares = operation.type in _ALIASES
        for position, tensor in enumerate(operation.outputs):
            source = operation.inputs[position].ref() if shares else None
            owners[tensor.ref()] = owners[source] if shares else tensor.ref()
    return owners


def _size(tensor, owners, sizes):
    """Bytes of a tensor, given the `sizes` of those before it."""
    operation = tensor.op
    if tensor.dtype == tf.variant:
        return _list_size(tensor)
    if operation.type == "ReadVariableOp" or tensor.dtype in (tf.resource, tf.string):
        return 0
    elements = tensor.shape.num_elements()
    if elements is None:
        return max((sizes[owners[t.ref()]] for t in operation.inputs), default=0)
    return elements * tensor.dtype.size


def _list_size(tensor):
    """Bytes that a loop has put into a list of tensors by its end."""
    operation = tensor.op
    if operation.type not in _LOOPS:
        return 0
    [body] = [b for name, b in tensorflow_internals.called(operation) if name == "body"]
    last = body.outputs[tensor.value_index]
    while last.op.type in _ALIASES:
        last = last.op.inputs[0]
    if last.op.type not in _APPENDS:
        return 0
    # The arguments of a loop start with its counter and its largest number of rounds.
    rounds = tf.get_static_value(operation.inputs[1])
    element = last.op.inputs[-1]
    size = (element.shape.num_elements() or 0) * element.dtype.size
    return size * max(1 if rounds is None else int(rounds), 1)


def _bodies(operation):
    return [body for _, body in tensorflow_internals.called(operation)]

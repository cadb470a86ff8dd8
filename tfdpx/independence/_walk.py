"""Walks a graph from its inputs to its outputs, and asks a rule at each operation."""

import tensorflow as tf

from tfdpx._keras import tensorflow_internals
from tfdpx.independence import _gradients, hidden_state
from tfdpx.independence._values import Fixed, Handle, NotProvable, PerExample, Unknown
from tfdpx.independence.lengths import Length, symbol
from tfdpx.independence.registry import rule_of

# Such draw from a state of their own, which no example changes.
_RANDOM = ("Multinomial", "ParameterizedTruncatedNormal", "Random", "TruncatedNormal")
_STATEFUL = {}
SHARED_DRAW = "it draws once for all examples of a pass"


class Walk:
    """What is known of the tensors of a graph, and of what it does besides.

    Args:
        rows: `Length` of the batch axis of the inputs.

    Attributes:
        problems: Dict, its keys are reasons why side effects may let examples interact.
    """

    def __init__(self, rows):
        self.rows = rows
        self.problems = {}
        self._written = set()
        self._draws, self._shared, self._seeds = [], [], {}

    def __call__(self, graph, inputs, targets, operations=None):
        """List of the values of `targets`.

        Args:
            graph: `tf.Graph` of a function.
            inputs: Dict `{id of an input: value}`; what is captured need not be among them.
            targets: Tensors of `graph`.
            operations: Those whose side effects count; by default all of `graph`.
        """
        values = {id(inner): _captured(outer) for outer, inner in graph.captures}
        outputs = Frame(self, {**values, **inputs}, "").run(
            targets, graph.get_operations() if operations is None else operations
        )
        for name, sources in self._draws:
            if not sources & self._written:
                self.problems[f"{name}: it draws the same random numbers in every step"] = None
        for name, sources in self._shared:
            if sources & self._written:
                self.problems[f"{name}: {SHARED_DRAW}"] = None
        return outputs

    def writes(self, handle):
        """Notes that the graph assigns to a variable what no example changes."""
        self._written.add(handle)

    def draws_from(self, name, seed, shape):
        """Notes a draw for rows by a seed, a tensor; two of one seed must be of one shape.

        Else the random numbers of two rows overlap.
        """
        _, first = self._seeds.setdefault(id(seed), (seed, shape))
        if first != shape:
            self.problems[f"{name}: it draws by a seed of another draw, in another shape"] = None

    def shares(self, name, sources):
        """Notes that all rows meet one value, which comes from `sources`."""
        self._shared.append((name, sources))

    def draws(self, name, sources):
        """Notes that random numbers are drawn by a seed that comes from `sources`."""
        self._draws.append((name, sources))


class Frame:
    """One run of a graph, on what is known of its inputs.

    Args:
        walk: `Walk`.
        values: Dict `{id of a tensor: value}`, of the inputs at least.
        path: Str, the operations that called it.
        differentiated: Whether gradients are taken through it.
    """

    def __init__(self, walk, values, path, differentiated=True):
        self.walk = walk
        self.path = path
        self._differentiated = differentiated
        self._values = values

    def run(self, targets, operations):
        """List of the values of `targets`, after the side effects of `operations`."""
        effects = [op for op in operations if has_effects(op)]
        for operation in self._ordered([*(t.op for t in targets), *effects]):
            self._apply(operation)
        return [self._values[id(t)] for t in targets]

    def enter(self, graph, inputs, name, differentiated=True):
        """The frame of a graph that an operation of this one calls.

        Args:
            graph: `tf.Graph` of a function.
            inputs: List of the values of its inputs.
            name: Str, of the operation.
            differentiated: Whether gradients are taken through it, as far as through this one.
        """
        values = {id(t): value for t, value in zip(graph.inputs, inputs, strict=True)}
        return Frame(self.walk, values, f"{name}/", self._differentiated and differentiated)

    def known(self, tensor):
        """The value of a tensor that an operation which was met needs."""
        return self._values[id(tensor)]

    def outer_values(self, graph, tensors):
        """List of the values of tensors that a function inside of `graph` reads."""
        own = [t for t in tensors if not hasattr(t, "numpy") and t.graph is graph]
        values = dict(zip(map(id, own), self.run(own, []), strict=True))
        return [values[id(t)] if id(t) in values else _captured(t) for t in tensors]

    def _ordered(self, operations):
        """`operations` and what they need, each after its own needs; loops may refer forwards."""
        order, seen, stack = [], set(), [(op, False) for op in reversed(operations)]
        while stack:
            operation, ready = stack.pop()
            if ready:
                order.append(operation)
            elif operation.name not in seen:
                seen.add(operation.name)
                if not operation.outputs or id(operation.outputs[0]) not in self._values:
                    stack.append((operation, True))
                    stack.extend((t.op, False) for t in operation.inputs)
        return order

    def _apply(self, operation):
        inputs = [self._values[id(t)] for t in operation.inputs]
        site = Site(self, operation)
        try:
            values = rule_of(operation.type)(site, *inputs)
            values = values if isinstance(values, list) else [values]
            if self._differentiated:
                _gradients.check(site, inputs, values)
        except Exception as lost:  # Also where a rule fails on what nobody thought of.
            values = [Unknown(site.reason(lost))] * len(operation.outputs)
            if has_effects(operation):
                self.walk.problems[site.reason(lost)] = None
        for tensor, value in zip(operation.outputs, values, strict=True):
            self._values[id(tensor)] = value


class Site:
    """An operation in a frame: what a rule may ask of it.

    Attributes:
        frame: `Frame`.
        operation: `tf.Operation`.
    """

    def __init__(self, frame, operation):
        self.frame = frame
        self.operation = operation

    @property
    def name(self):
        """The name of the operation and of those that called it."""
        return f"{self.frame.path}{self.operation.name}"

    @property
    def is_stateful(self):
        """Whether the operation keeps something, draws random numbers or runs Python."""
        return is_stateful(self.operation)

    def reason(self, lost):
        """`lost` with the name of the operation."""
        return f"operation '{self.name}' (of type {self.operation.type}): {lost}"

    def shares(self, value):
        """Notes that all rows meet one `Fixed` value here: no draw may be such."""
        if value.sources:
            name = f"operation '{self.name}' (of type {self.operation.type})"
            self.frame.walk.shares(name, value.sources)

    def attribute(self, name):
        """An attribute of the operation."""
        return self.operation.get_attr(name)

    def static(self, index=0):
        """Lengths of an output as TensorFlow infers them, a tuple of int or None; or None."""
        shape = self.operation.outputs[index].shape
        return None if shape.rank is None else tuple(shape)

    def shape(self, index=0, shape=None):
        """Tuple of `Length`s of an output that the number of rows does not change.

        Args:
            index: Int, of the output.
            shape: What the rule knows of it, a list of `Length` or None; or None.
        """
        static = self.static(index)
        if static is None:
            return None if shape is None or None in shape else tuple(shape)
        shape = [None] * len(static) if shape is None else shape
        if len(shape) != len(static):
            raise NotProvable("its output has another rank than expected")
        return tuple(
            self._length(index, axis, *both)
            for axis, both in enumerate(zip(static, shape, strict=True))
        )

    def _length(self, index, axis, static, length):
        if static is not None:
            return Length(static)
        return symbol(f"{self.name}:{index}:{axis}") if length is None else length

    def rows(self, like, axis, shape=None, index=0, after=None):
        """The `PerExample` of an output.

        Args:
            like: `PerExample` that gives the length of the axis of the rows.
            axis: Int, where that axis is now.
            shape: List of `Length` or None for the axes; the rank must be known.
            index: Int, of the output.
            after: `Length`, if it differs from the one of `like`.
        """
        if shape is None:
            static = self.static(index)
            if static is None:
                raise NotProvable("the number of its axes is not known")
            shape = [None] * len(static)
        shape = list(shape)
        if not 0 <= axis < len(shape):
            raise NotProvable("its output has no place for the rows")
        static = self.static(index) or (None,) * len(shape)
        if len(static) != len(shape):
            raise NotProvable("its output has another rank than expected")
        length = like.shape[like.axis]
        shape = [
            length if a == axis else self._length(index, a, *both)
            for a, both in enumerate(zip(static, shape, strict=True))
        ]
        return PerExample(tuple(shape), axis, like.after if after is None else after)

    def fixed(self, inputs, content=None, shape=None, like_rows=frozenset(), index=0):
        """The `Fixed` of an output that is made of `inputs`."""
        sources = frozenset().union(*(v.sources for v in inputs if isinstance(v, Fixed)))
        return Fixed(self.shape(index, shape), content, frozenset(like_rows), sources)


def _captured(tensor):
    """What is known of a tensor from outside of the graph."""
    if tensor.dtype == tf.resource:
        return Handle(id(tensor))
    if not hasattr(tensor, "numpy") or tensor.dtype == tf.variant:
        return Unknown(f"'{tensor.name}' comes from another graph")
    return Fixed(tuple(Length(n) for n in tensor.shape))


def is_stateful(operation):
    """Whether an operation keeps something, draws random numbers or runs Python."""
    is_stateful = _STATEFUL.get(operation.type)
    if is_stateful is None:
        is_stateful = _STATEFUL[operation.type] = operation.op_def.is_stateful
    return is_stateful or any(t.dtype == tf.resource for t in operation.inputs)


def has_effects(operation):
    """Whether an operation, or a function that it calls, may keep something or run Python."""
    if operation.type in hidden_state.HARMLESS or not is_stateful(operation):
        return False
    if operation.type.startswith(_RANDOM):
        return any(t.dtype == tf.resource for t in operation.inputs)
    bodies = [body for _, body in tensorflow_internals.called(operation)]
    if bodies and operation.type in hidden_state.CALLS:
        return any(has_effects(inner) for body in bodies for inner in body.get_operations())
    return True

"""The rule of `LSTM`, `GRU`, `SimpleRNN`, and of `RNN` with their cells.

At each of T time steps, a cell multiplies the input x_t by one kernel and the state h_t by another,
and adds up both products. Let g_t be the gradient with respect to this sum. The gradients of the
kernels are then the sums over time of x_t^T g_t and of h_t^T g_t, as in a `Dense` layer with T
positions.

Keras does not return these g_t, so this module runs the recurrence. It multiplies the inputs of all
time steps by their kernel at once, and a backward loop over time returns all g_t. Each row of a
result depends on only one row of the inputs.
"""

import dataclasses
import functools

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, tensorflow_internals
from tfdpx.per_example.rows import positions, sum_rows
from tfdpx.per_example.rowwise import cells_of, has_plain_cells
from tfdpx.per_example.rule import RuleOfParts, register
from tfdpx.per_example.rules.contraction import ProductRule


@register(keras.layers.RNN)
class RecurrentRule(RuleOfParts):
    """The rule of recurrent layers. A cell has two kernels, one for inputs and one for states."""

    keeps_draws = True

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`. The layer and all cells must have exactly Keras's classes."""
        del registered_class
        return has_plain_cells(layer)

    @classmethod
    def forward(cls, call, watch):
        """See `Rule.forward`. The gates are watched before their activations."""
        inner_loop = functools.partial(_run_layer, call, watch)
        layer = layer_internals.without(call.layer, inner_loop=inner_loop)
        return layer_internals.call_operation(layer, call.args, call.kwargs)

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        self.parts, self._biases = [], []
        gradients = iter(self.output_gradients)
        for cell, tensors in zip(cells_of(self.layer), call.kept["cells"], strict=True):
            at_inputs = next(gradients)
            at_states = next(gradients) if _step_class(cell) is _GRUStep else at_inputs
            for kernel, operands, gradient in (
                (cell.kernel, tensors["inputs"], at_inputs),
                (cell.recurrent_kernel, tensors["states"], at_states),
            ):
                if self.explains(kernel):
                    self.parts.append(_KernelRule(self, kernel, operands, gradient))
            if self.explains(cell.bias):
                gate_gradients = [at_inputs, at_states] if len(cell.bias.shape) > 1 else [at_inputs]
                self._biases.append((cell.bias, gate_gradients))

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`. Returns the gradients of the biases."""
        sums = [
            (bias, [sum_rows(gradient, self.num_views, [1]) for gradient in gradients])
            for bias, gradients in self._biases
        ]
        return [(b, parts[0] if len(parts) == 1 else tf.stack(parts, 1)) for b, parts in sums]


class _KernelRule(ProductRule):
    """The rule of one kernel of a cell. The positions are the time steps of all views.

    Args:
        rule: The `RecurrentRule` of the layer.
        kernel: The `keras.Variable`, [in, gates * units].
        operands: Dict of the arguments for `_gate_operands`.
        gradients: float32 [B * K, T, gates * units], the gradients with respect to the products
            with the kernel.
    """

    small_gradients = ()

    def __init__(self, rule, kernel, operands, gradients):
        super().__init__(rule.call, [gradients], rule.num_views, [kernel])
        self._operands = operands

    @functools.cached_property
    def inputs_by_position(self):
        """See `ProductRule.inputs_by_position`. If gates have separate inputs, they are groups."""
        groups = _gate_operands(**self._operands)
        return tf.concat([positions(x, self.num_views, groups=True) for x in groups], axis=1)

    @functools.cached_property
    def output_gradients_by_position(self):
        """See `ProductRule.output_gradients_by_position`."""
        groups = tf.split(self.output_gradients[0], len(_gate_operands(**self._operands)), axis=2)
        return tf.concat([positions(g, self.num_views, groups=True) for g in groups], axis=1)

    def to_kernel(self, products):
        """See `ProductRule.to_kernel`."""
        if products.shape[-3] == 1:
            return tf.squeeze(products, axis=-3)
        return tf.concat(tf.unstack(products, axis=-3), axis=-1)

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        return [self._kernel_instances]


def _gate_operands(vectors, masks, last=None):
    """Returns a list of the tensors that a kernel multiplies: one for each gate, or one for all.

    Args:
        vectors: [N, ..., d].
        masks: List of dropout masks [N, d], one for each gate or one for all. The list is empty
            without dropout.
        last: Optional [N, ..., d], a factor for the tensor of the last gate only.
    """
    if vectors.shape.rank > 2:
        masks = [mask[:, tf.newaxis] for mask in masks]
    operands = [vectors * mask for mask in masks] or [vectors]
    if last is not None:
        operands = operands * (3 // len(operands))
        operands[2] *= last
    return operands


def _multiply_by_kernel(kernel, vectors, masks):
    """Applies dropout `masks` to `vectors` [N, ..., d], and multiplies by a kernel [d, out]."""
    operands = _gate_operands(vectors, masks)
    kernels = tf.split(kernel, len(operands), axis=1)
    products = [
        tf.matmul(x, k) if x.shape.rank == 2 else tf.tensordot(x, k, 1)
        for x, k in zip(operands, kernels, strict=True)
    ]
    return products[0] if len(products) == 1 else tf.concat(products, axis=-1)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A time step of a `SimpleRNNCell` in two parts: the product with the kernel, and the rest.

    Attributes:
        cell: The cell.
        kernel: Tensor, the cell's recurrent kernel.
        bias: Tensor, the bias that is added to the product with this kernel, or None.
        masks: List of dropout masks [N, units] of the states.
    """

    cell: keras.Layer
    kernel: tf.Tensor
    bias: tf.Tensor | None
    masks: list

    def multiply(self, state):
        """Returns the product of the cell's first state, [N, units], and the recurrent kernel."""
        product = _multiply_by_kernel(self.kernel, state, self.masks)
        return product if self.bias is None else product + self.bias

    def advance(self, x, product, states):
        """Returns a list of the states after the time step.

        Args:
            x: The product of the inputs and their kernel, [N, gates * units].
            product: The result of `multiply`.
            states: List of the states [N, units] before the step.
        """
        del states
        return [self.cell.activation(x + product)]


class _LSTMStep(_Step):
    def advance(self, x, product, states):
        cell = self.cell
        i, f, candidate, o = tf.split(x + product, 4, axis=1)
        c = cell.recurrent_activation(f) * states[1]
        c += cell.recurrent_activation(i) * cell.activation(candidate)
        return [cell.recurrent_activation(o) * cell.activation(c), c]


class _GRUStep(_Step):
    def advance(self, x, product, states):
        z, reset = tf.split(self.gates(x, product), 2, axis=1)
        candidate = self.candidate(product, states[0], reset)
        candidate = self.cell.activation(x[:, -self.cell.units :] + candidate)
        return [z * states[0] + (1 - z) * candidate]

    def gates(self, x, product):
        """Returns the update gate and the reset gate in one tensor, [N, ..., 2 * units]."""
        size = 2 * self.cell.units
        return self.cell.recurrent_activation(x[..., :size] + product[..., :size])

    def candidate(self, product, state, reset):
        return reset * product[:, -self.cell.units :]


class _GRUStepThatResetsBefore(_GRUStep):
    """A GRU step with `reset_after=False`: the kernel multiplies the state after its reset."""

    def multiply(self, state):
        return _multiply_by_kernel(self.kernel[:, : -self.cell.units], state, self.masks[:2])

    def candidate(self, product, state, reset):
        return tf.matmul(
            _gate_operands(state, self.masks)[-1] * reset, self.kernel[:, -self.cell.units :]
        )


def _step_class(cell):
    if isinstance(cell, keras.layers.GRUCell):
        return _GRUStep if cell.reset_after else _GRUStepThatResetsBefore
    return _LSTMStep if isinstance(cell, keras.layers.LSTMCell) else _Step


def _run_layer(call, watch, sequences, initial_state, mask, training):
    """Runs the cells of a layer, in place of `keras.layers.RNN.inner_loop`.

    Returns the outputs of the last time step, the outputs of all time steps, and the final states.
    """
    layer, cells = call.layer, cells_of(call.layer)
    is_stacked = cells[0] is not layer.cell
    flags = tf.nest.flatten(mask)[0]
    if flags is not None:
        flags = tf.cast(flags if flags.shape.rank == 2 else flags[:, :, 0], "bool")
    if layer.go_backwards:
        sequences, flags = (t if t is None else tf.reverse(t, [1]) for t in (sequences, flags))
    call.kept["cells"], final_states = [], []
    for cell, states in zip(cells, initial_state if is_stacked else [initial_state], strict=True):
        states_of_cell, options = tf.nest.flatten(states), (training, layer.unroll)
        tensors, ends = _run_cell(cell, watch, sequences, states_of_cell, flags, *options)
        call.kept["cells"].append(tensors)
        final_states.append(tf.nest.pack_sequence_as(states, ends))
        last = ends[0]
        if layer.return_sequences or cell is not cells[-1]:
            before = tensors["states"]["vectors"]
            sequences = tf.concat([before[:, 1:], last[:, tf.newaxis]], axis=1)
    outputs = sequences if layer.return_sequences else last[:, tf.newaxis]
    if flags is not None:
        if not layer.zero_output_for_mask:  # Only outputs before the first unmasked step are zero.
            flags = tf.cumsum(tf.cast(flags, "int32"), axis=1) > 0
        flags = flags if layer.return_sequences else flags[:, -1:]
        outputs = tf.where(flags[:, :, tf.newaxis], outputs, tf.zeros_like(outputs))
    return outputs[:, -1], outputs, final_states if is_stacked else final_states[0]


def _run_cell(cell, watch, sequences, states, flags, training, unroll):
    """Returns a dict of tensors for the rule of a cell, and the states after the last time step.

    Args:
        cell: The cell.
        watch: As for `Rule.forward`.
        sequences: [N, T, in].
        states: List of [N, units], the states at the start.
        flags: Optional bool [N, T], False for time steps that are masked.
        training: Bool, whether to apply dropout.
        unroll: Bool, whether the loop over time steps is a Python loop.
    """
    dtype = cell.compute_dtype
    sequences, states = tf.cast(sequences, dtype), [tf.cast(s, dtype) for s in states]
    weights = cell.kernel, cell.recurrent_kernel, cell.bias
    kernel, recurrent_kernel, bias = (
        w if w is None else tf.cast(tf.convert_to_tensor(w), dtype) for w in weights
    )
    masks = [], []
    if training and cell.dropout:
        masks[0].extend(tf.nest.flatten(cell.get_dropout_mask(sequences[:, 0])))
    if training and cell.recurrent_dropout:
        masks[1].extend(tf.nest.flatten(cell.get_recurrent_dropout_mask(states[0])))
    recurrent_bias = None
    if bias is not None and bias.shape.rank == 2:
        bias, recurrent_bias = tf.unstack(bias)
    step = _step_class(cell)(cell, recurrent_kernel, recurrent_bias, masks[1])
    x = _multiply_by_kernel(kernel, sequences, masks[0])
    x = watch(x if bias is None else x + bias)
    # The gradients after both kernels are the same, except in `_GRUStep`, which multiplies a part
    # of one product by a gate.
    probes = [watch(tf.zeros_like(x))] if type(step) is _GRUStep else []
    before, *ends = _recurrence(step, flags, x, probes, states, unroll)
    operands = {"vectors": before, "masks": masks[1]}
    if type(step) is _GRUStepThatResetsBefore:
        operands["last"] = step.gates(x, step.multiply(before))[:, :, cell.units :]
    return {"inputs": {"vectors": sequences, "masks": masks[0]}, "states": operands}, ends


def _recurrence(step, flags, x, probes, states, unroll):
    """Runs a cell. Returns its first state before each step, [N, T, units], and all final states.

    Args:
        step: The `_Step`.
        flags: As for `_run_cell`.
        x: [N, T, gates * units], the products of the inputs and their kernel.
        probes: List with one tensor of zeros [N, T, gates * units], or an empty list. The gradient
            of these zeros is the gradient with respect to the products with the recurrent kernel.
            The list is empty if `x` has the same gradient.
        states: List of [N, units], the states at the start.
        unroll: As for `_run_cell`.
    """
    length, state_arrays = x.shape[1] or tf.shape(x)[1], []

    def select_step(t, tensor):
        return tf.gather(tensor, t, axis=1)

    def advance(t, x, product, states):
        new_states = step.advance(x, product, states)
        if flags is None:
            return new_states
        is_counted = select_step(t, flags)[:, tf.newaxis]
        return [tf.where(is_counted, *pair) for pair in zip(new_states, states, strict=True)]

    def loop(body, values, dtypes, backwards=False):
        """Runs `body(t, values)` for each time step t.

        `body` returns the next values and a list of outputs. `loop` returns the values after the
        last call, and for each output a `tf.TensorArray` with an entry for each t.
        """
        arrays = [tf.TensorArray(d, length, clear_after_read=False) for d in dtypes]

        def run_step(count, values, arrays):
            t = length - 1 - count if backwards else count
            values, rows = body(t, values)
            return count + 1, values, [a.write(t, r) for a, r in zip(arrays, rows, strict=True)]

        if unroll:  # XLA cannot compile a mapped loop.
            for count in range(length):
                count, values, arrays = run_step(count, values, arrays)
            return values, arrays
        start = tf.constant(0), list(values), arrays
        return tf.while_loop(lambda count, *_: count < length, run_step, start)[1:]

    def stack(array, like):
        """Stacks a `TensorArray` of T tensors [N, d] into one tensor [N, T, d].

        The tensor `like`, [..., d], has the static length d.
        """
        rows = tf.transpose(array.stack(), [1, 0, 2])
        rows.set_shape([*x.shape[:2], like.shape[-1]])
        return rows

    def forward(x, *tensors):
        def body(t, states):
            product = step.multiply(states[0])
            return advance(t, select_step(t, x), product, states), [*states, product]

        states = tensors[len(probes) :]
        ends, arrays = loop(body, states, [x.dtype] * (1 + len(states)))
        state_arrays.extend(arrays)
        return [stack(arrays[0], states[0]), *ends]

    def backward(at_first, *at_ends):
        def body(t, at_states):
            *states, product = (array.read(t) for array in state_arrays)
            row = select_step(t, x)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([row, product, states])
                new_states = advance(t, row, product, states)
            at_row, at_product, at_before = tape.gradient(
                new_states, (row, product, states), at_states, tf.UnconnectedGradients.ZERO
            )
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(states[0])
                product = step.multiply(states[0])
            at_before[0] += tape.gradient(product, states[0], at_product) + select_step(t, at_first)
            return at_before, [at_row, at_product][: 1 + len(probes)]

        at_start, arrays = loop(body, at_ends, [x.dtype] * (1 + len(probes)), backwards=True)
        return [*(stack(array, x) for array in arrays), *at_start]

    return tensorflow_internals.differentiated_by(backward, forward, x, *probes, *states)

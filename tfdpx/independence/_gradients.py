"""Gradients that are written by hand: TensorFlow does not derive them, so they are walked too."""

from tfdpx._keras import tensorflow_internals
from tfdpx.independence._values import BatchSum, NotProvable, PerExample, Unknown, same_axis


def check(site, inputs, outputs):
    """Raises `NotProvable` unless the gradient at each row of the inputs is made of that row alone.

    Args:
        site: `Site` of an operation.
        inputs: List of the values of its inputs.
        outputs: List of the values of its outputs.
    """
    if not any(isinstance(value, (PerExample, BatchSum)) for value in inputs):
        return
    if not tensorflow_internals.has_own_gradient(site.operation):
        return
    if any(isinstance(value, BatchSum) for value in inputs):
        raise NotProvable("it has a gradient of its own, and takes a sum over the examples")
    try:
        graph, which = tensorflow_internals.own_gradient(site.operation)
    except Exception as error:
        raise NotProvable(f"its own gradient could not be traced: {error}") from error
    # The gradient at an output is given row by row, if the output has rows.
    given = [
        value if isinstance(value, PerExample) else Unknown("a gradient of what examples share")
        for value in outputs
    ]
    outer = site.frame.outer_values(site.operation.graph, [outer for outer, _ in graph.captures])
    frame = site.frame.enter(graph, given + outer, f"{site.name}/gradient", differentiated=False)
    gradients = frame.run(graph.outputs, graph.get_operations())
    for index, value in zip(which, gradients, strict=True):
        if isinstance(inputs[index], PerExample):
            if isinstance(value, Unknown):
                raise NotProvable(f"its own gradient may let examples interact, by {value.reason}")
            if not isinstance(value, PerExample):
                raise NotProvable("its own gradient has no rows")
            same_axis(inputs[index], value)

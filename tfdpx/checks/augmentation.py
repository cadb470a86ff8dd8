"""Checks of an augmentation, which may only make views of one example at a time."""

from tfdpx._keras import layer_internals
from tfdpx.augment import LayerViews
from tfdpx.checks.state import problems_of_graph


def problems_of_augment(augment):
    """Yields a text for each problem, for example if an augmentation mixes examples.

    Args:
        augment: The augmentation of `tfdpx.training.views.Views`, after it has made views; or None.
    """
    inner = getattr(augment, "augment", augment)
    layers = layer_internals.flatten_layers(inner.layer) if isinstance(inner, LayerViews) else []
    for layer in layers:
        if type(layer).__name__ in ("MixUp", "CutMix"):
            yield (
                f"{type(layer).__name__} makes the view of one example depend on another, and here "
                "each view is made by itself. Use `tfdpx.augment.MixViews`, which mixes views of "
                "one example."
            )
    for graph in inner.graphs() if hasattr(inner, "graphs") else []:
        yield from problems_of_graph(graph, getattr(inner, "layer", None), "The augmentation")

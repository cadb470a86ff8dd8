"""What each type of operation does to rows, a file for each kind; importing registers them."""

from tfdpx.independence.rules import (
    calls,
    copies,
    elementwise,
    images,
    lists,
    moving,
    numbers,
    picking,
    products,
    reductions,
    state,
    texts,
)

__all__ = [
    "calls",
    "copies",
    "elementwise",
    "images",
    "lists",
    "moving",
    "numbers",
    "picking",
    "products",
    "reductions",
    "state",
    "texts",
]

"""Proves from a traced graph that no example influences another: batch independence.

What is proved, where the verdict is "proved":

    Row i of every output of the model, and of every captured layer, is a function of row i of the
    inputs, of the variables, and of random numbers. The function is the same for every i and for
    every content of the batch. The loss is a sum over the rows of a function of row i of targets,
    weights and outputs, but for factors and terms that no example changes.

It holds for the graph that was walked, which is the microbatch that trains: for every number of
rows if it was traced so, else for its own. What is not proved is computed example by example.

- Random numbers are drawn row by row by a state that no example changes. Which draw a row gets goes
  by its place, so places change nothing in distribution. A seed that never changes counts as a
  table of numbers by place, and is not proved.
- Variables may be assigned to what no example has a part in (a seed's counter). Everything else
  that an operation keeps, and all Python within the graph, is not proved.
- The backward pass needs no walk where TensorFlow derives it: the derivative of a sum of functions
  of one row each, at row i, is the gradient of row i's. Gradients written by hand are walked as
  well.
- An assertion may stop the step, whichever row fails it. Neither that nor time is covered.

How: `values` says what can be known of a tensor, `rules` what each type of operation makes of it,
`walk` goes through the graph. A type without a rule, and whatever a rule cannot show, is unknown,
and unknown stays unknown. `docs/proofs/independence.md` has the lemmas.
"""

from tfdpx.independence.verdict import Independence, independence_of

__all__ = ["Independence", "independence_of"]

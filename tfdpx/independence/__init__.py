"""Proves from a traced graph that examples keep apart, where the checks can only try.

What is proved, where the verdict is "proved":

    Row i of every output of the model, and of every captured layer, is a function of row i of the
    inputs, of the variables, and of random numbers. The function is the same for every i and for
    every content of the batch. The loss is a sum over the rows of a function of row i of targets,
    weights and outputs, but for factors and terms that no example changes.

It holds for the graph that was walked: `independence_of` traces it for any number of rows, so
for every number, and so does a training step whose passes vary in size; any other step for the rows
of the passes that were tried.

- Random numbers are drawn row by row by a state that no example changes. Which draw a row gets goes
  by its place, so places change nothing in distribution. A seed that never changes counts as a
  table of numbers by place, and is not proved.
- Variables may be assigned to what no example has a part in (a seed's counter). Everything else
  that an operation keeps, and all Python within the graph, is not proved.
- The backward pass needs no walk where TensorFlow derives it: the derivative of a sum of functions
  of one row each, at row i, is that of row i's. Gradients written by hand are walked as well.
- An assertion may stop the step, whichever row fails it. Neither that nor time is covered.
- Python that acts otherwise when the step is traced again, or in eager mode, is not covered: a
  model that runs eagerly is not proved.

How: `values` says what can be known of a tensor, `rules` what each type of operation makes of it,
`walk` goes through the graph. A type without a rule, and whatever a rule cannot show, is unknown,
and unknown stays unknown. `docs/proofs/independence.md` has the lemmas.
"""

from tfdpx.independence.verdict import Independence, independence_of

__all__ = ["Independence", "independence_of"]

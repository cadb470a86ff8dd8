"""Lengths of axes as products: 4 * rows * time, of which a factor may be known only at run time.

Two such products that are written alike are equal, whatever the unknown factors are.
"""

import collections
import dataclasses
import functools
import operator

_ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class Length:
    """A whole number times unknown whole numbers.

    Attributes:
        factor: Int, also negative: shapes have a -1 where a length is to be found.
        symbols: Sorted tuple of str, names of unknown numbers; one may come twice.
    """

    factor: int
    symbols: tuple = ()

    def __mul__(self, other):
        """The product of two lengths."""
        return Length(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def over(self, other):
        """The quotient, a `Length`; None if it is not known to be whole."""
        left, right = collections.Counter(self.symbols), collections.Counter(other.symbols)
        if not other.factor or self.factor % other.factor or right - left:
            return None
        return Length(self.factor // other.factor, tuple(sorted((left - right).elements())))

    @property
    def counts_rows(self):
        """Whether it changes with the number of rows of a batch."""
        return _ROWS in self.symbols

    @property
    def known(self):
        """An int; None if there are unknown factors."""
        return None if self.symbols else self.factor


ONE, MINUS_ONE = Length(1), Length(-1)
ROWS = Length(1, (_ROWS,))


def symbol(name):
    """The length that is known by `name` alone, and is the same for every number of rows."""
    return Length(1, (name,))


def product(lengths):
    """The product of any number of lengths."""
    return functools.reduce(operator.mul, lengths, ONE)

"""Images that know no data: what is computed from them costs no privacy."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.synthetic.dead_leaves import DeadLeaves
from tfdpx.synthetic.shapes import Shapes
from tfdpx.synthetic.spectrum import Spectrum
from tfdpx.synthetic.strokes import Strokes

__all__ = ["DeadLeaves", "Shapes", "Spectrum", "Strokes"]

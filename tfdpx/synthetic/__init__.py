"""Images that know no data: what is computed from them costs no privacy."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.synthetic.dead_leaves import DeadLeaves
from tfdpx.synthetic.generator import Generator
from tfdpx.synthetic.shapes import Shapes
from tfdpx.synthetic.sheet import contact_sheet
from tfdpx.synthetic.spectrum import Spectrum
from tfdpx.synthetic.strokes import Strokes

# A class derived from one of them may hold data, and is none of them.
KINDS = (DeadLeaves, Shapes, Spectrum, Strokes)

__all__ = ["KINDS", "DeadLeaves", "Generator", "Shapes", "Spectrum", "Strokes", "contact_sheet"]

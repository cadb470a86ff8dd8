"""Images that know no data: what is computed from them costs no privacy."""

from tfdpx.synthetic.dead_leaves import DeadLeaves
from tfdpx.synthetic.generator import Generator
from tfdpx.synthetic.shapes import Shapes
from tfdpx.synthetic.sheet import contact_sheet
from tfdpx.synthetic.spectrum import Spectrum
from tfdpx.synthetic.strokes import Strokes

__all__ = ["DeadLeaves", "Generator", "Shapes", "Spectrum", "Strokes", "contact_sheet"]

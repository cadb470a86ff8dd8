"""Makes the programs of the folder tools importable, as they are for one another."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

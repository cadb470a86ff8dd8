"""Makes the programs of the folder tools importable for tests, as they are for one another."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

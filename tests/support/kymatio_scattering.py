"""Kymatio's NumPy scattering transform: the oracle of `tfdpx.layers.Scattering2D`."""

import importlib
from unittest import mock

import scipy.special

# Kymatio 0.3 imports this for its transform of volumes, and SciPy 1.17 has removed it.
with mock.patch.object(scipy.special, "sph_harm", create=True):
    Scattering2D = importlib.import_module("kymatio.numpy").Scattering2D

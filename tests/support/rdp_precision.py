"""The allowed excess of the installed dp_accounting's RDP epsilon over the true one."""

import importlib.metadata

_RELEASE = tuple(int(part) for part in importlib.metadata.version("dp-accounting").split(".")[:3])

# From 0.4.4 on dp_accounting leaves out fractional orders that do not converge. Its epsilon stays
# valid: it is never too low, but gets looser with the sampling probability.
SKIPS_ORDERS = _RELEASE >= (0, 4, 4)

# Relative, for sampling probabilities of up to 0.4.
EXCESS = 5e-4 if SKIPS_ORDERS else 0.0
EXCESS_AT_LARGE_PROBABILITY = 0.035 if SKIPS_ORDERS else 0.0

"""Studies of features that cost no privacy, for example from scattering or generated images."""

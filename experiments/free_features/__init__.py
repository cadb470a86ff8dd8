"""Features that cost no privacy: from scattering, from generated images, with few weights."""

"""Features that cost no privacy: of scattering, of generated images, of few weights."""

"""tfdpx, Opacus, jax-privacy and tensorflow-privacy in one sitting, each in its own environment."""

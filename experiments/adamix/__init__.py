"""The study of "Mixed Differential Privacy in Computer Vision" (Golatkar et al. 2022)."""

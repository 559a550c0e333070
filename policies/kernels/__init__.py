"""Denoising kernels of flow matching and diffusion: steps, and their log-probabilities."""

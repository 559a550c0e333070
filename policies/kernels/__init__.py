"""Denoising kernels of flow matching and diffusion: their steps, and the log-probabilities of those."""

"""Encoders of pictures, and augmentations of them."""

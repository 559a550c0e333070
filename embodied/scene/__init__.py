"""Shapes of a scene, which viewers and renderers draw."""

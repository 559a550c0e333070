"""Rendering: with a ray tracer, or with MuJoCo's renderer."""

"""Pictures: of the ray tracer, or of MuJoCo's renderer."""

"""Environments built on other environments, and the engine that batches them."""

"""Policies: networks that turn observations into action chunks and score what they sampled."""

"""Evaluation of policies: success rates, means, repeatability, films."""

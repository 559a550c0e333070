"""Hover in crazyflow, another quadrotor simulator, for evaluations: `evaluate.py sim=crazyflow`."""

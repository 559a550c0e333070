"""Perturbed tasks of LIBERO-PRO and LIBERO-plus: which can run, and what differs in them."""

"""Policies on microcontrollers: C source of a network, and its proof on an emulated core."""

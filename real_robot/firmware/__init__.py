"""Policies on microcontrollers: C source of a network, and its verification on an emulated core."""

"""Simulators in other processes, of this interpreter or of another one."""

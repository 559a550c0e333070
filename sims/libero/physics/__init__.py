"""Physics: compiled stepping of many simulations with robosuite's controller."""

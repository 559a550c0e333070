"""Physics of quadrotors: airframes and rotors, the dynamics without a task, air, and what real flights differ in."""

"""Learning on a robot with a person: the robot as an environment, resets, interventions."""

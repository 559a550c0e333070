"""The robot interface, its control loop, human intervention, and a robot as an Environment."""

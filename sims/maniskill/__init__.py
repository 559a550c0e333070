"""ManiSkill 3 tasks: robot arms and what they handle, simulated by SAPIEN and PhysX."""

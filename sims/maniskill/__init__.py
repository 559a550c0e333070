"""ManiSkill 3 tasks: robot arms and objects, simulated by SAPIEN and PhysX."""

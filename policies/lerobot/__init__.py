"""LeRobot's policies: ACT, its diffusion policy, and the folders in which it publishes policies."""

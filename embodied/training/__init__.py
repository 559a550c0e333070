"""The loop of reinforcement learning, and the experiment around it."""

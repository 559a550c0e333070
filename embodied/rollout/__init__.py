"""What environments and policies did together: rollouts, episodes, replay."""

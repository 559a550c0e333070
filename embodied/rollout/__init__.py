"""Data from environments and policies: rollouts, episodes, replay."""

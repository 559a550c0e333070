"""Experience that outlives a rollout: episodes, replay and pictures."""

"""The core: contracts, environments, policies, rollouts, algorithms, the trainer and what it leaves behind."""

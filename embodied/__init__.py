"""Core: contracts, environments, policies, rollouts, algorithms, training, evaluation and deployment."""

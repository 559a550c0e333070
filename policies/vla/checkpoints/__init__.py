"""Published checkpoints of pi0 and others: configuration, weights, statistics, recognition and publishing."""

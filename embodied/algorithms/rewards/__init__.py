"""Processing of rewards by learners: their scale, and progress as a reward."""

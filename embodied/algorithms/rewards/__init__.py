"""What learners make of rewards: their scale, and progress as a reward."""

"""Data sets of others and ours: files of LeRobot and of arrays, their contract, outcomes, and match with a run."""

"""A robot at another computer: its actor, the learner, and the messages and stored rollouts between them."""

"""What a robot is, the loop that controls it, a person beside it, and all that as an Environment."""

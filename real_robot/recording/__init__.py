"""What a robot did: recordings as MCAP, their replay, and LeRobot datasets made of them."""

"""Recordings of a robot as MCAP, their replay, and LeRobot datasets made from them."""

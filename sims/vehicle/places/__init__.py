"""What vehicles drive in: rooms and the people in them, tracks."""

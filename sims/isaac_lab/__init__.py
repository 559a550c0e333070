"""Isaac Lab's environments as ours: its simulator steps many worlds at once."""

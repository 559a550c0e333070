"""Isaac Lab's environments as ours: many worlds that its simulator steps at once."""

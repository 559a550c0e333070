"""robosuite's manipulation tasks, with its own controllers, rewards and success checks."""

"""robosuite's manipulation tasks, with robosuite's own controllers, rewards and success checks."""

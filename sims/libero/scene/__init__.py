"""A task as one MuJoCo model: its description, workspace, objects, goal and initial states."""

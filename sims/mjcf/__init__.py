"""MJCF models as batched environments: a task is one file of plain functions, stepped by MuJoCo or mujoco_warp."""

"""Any MJCF model as batched environments: a task is one file of plain functions, MuJoCo or mujoco_warp steps it."""

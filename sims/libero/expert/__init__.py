"""The scripted expert: grasping, planning, demonstrations."""

"""The scripted expert, how it grasps and plans, and its demonstrations."""

"""Wheeled vehicles with a planar lidar: differential drive and bicycle models, rooms to cross and tracks to race on."""

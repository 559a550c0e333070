"""Wheeled vehicles with a planar lidar: differential drive and bicycle models; rooms and race tracks."""

"""Classical planners as baselines, which are given the track."""

"""Classical planners as baselines, which use the track."""

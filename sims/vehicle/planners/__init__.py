"""Classical planners as baselines, with and without a map."""

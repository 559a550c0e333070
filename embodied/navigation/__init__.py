"""Navigation: maps of obstacles, planners and guards that simulators and robots share."""

"""Programs that measure speed, and results that documents refer to."""

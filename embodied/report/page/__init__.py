"""A report as one HTML file that loads nothing."""

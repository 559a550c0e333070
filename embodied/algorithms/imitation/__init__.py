"""Learners that train on actions of demonstrations, of a teacher, or of successful episodes."""

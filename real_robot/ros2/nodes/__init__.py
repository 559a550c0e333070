"""The nodes, what they share, and the table of what is launched together."""

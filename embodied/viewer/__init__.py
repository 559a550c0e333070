"""A live view of environments in the browser; nothing here knows a simulator."""

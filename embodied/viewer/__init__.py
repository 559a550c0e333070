"""Live view of environments in the browser, independent of simulators."""

"""Common parts of the programs: configuration, options, messages, devices."""

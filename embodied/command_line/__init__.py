"""What programs share: configuration, options, messages, devices."""

"""What policies need outside of training: networks to export, chunks in real time, latencies."""

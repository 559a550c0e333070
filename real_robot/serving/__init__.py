"""Remote and slow policies: server and client, ONNX Runtime, timed execution of chunks."""

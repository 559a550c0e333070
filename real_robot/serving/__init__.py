"""Policies that think elsewhere or slowly: server and client, ONNX Runtime, chunks on a clock."""

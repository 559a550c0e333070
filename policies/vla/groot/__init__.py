"""GR00T N1.5: policy, network, published weights, and LeRobot's folders of trained policies."""

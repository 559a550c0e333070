"""SmolVLA of LeRobot: policy, network, published weights, and its folders of trained policies."""

"""Parts of networks that learners, policies and exported graphs share: precision, value heads, wide layers, words."""

"""Pi0-FAST: a policy that writes chunks as tokens of their frequencies, its network, tokenizer and weights."""

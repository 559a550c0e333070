"""OpenVLA and OpenVLA-OFT: their network, its decoding of a whole chunk on PaliGemma, and published weights."""

"""Generation of action chunks from noise: the base of flow and diffusion policies, their networks and steering."""

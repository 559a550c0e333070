"""Goals as Markov decision processes of the dynamics, each a frozen dataclass of numbers; see `episode.Mdp`."""

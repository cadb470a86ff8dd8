"""Studies after Yu et al. 2022: individual epsilons and exact ones, groups, and people."""

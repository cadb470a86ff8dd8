"""Yu et al. 2022: how near individual epsilons are to exact ones."""

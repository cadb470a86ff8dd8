"""Yu et al. 2022: how close individual epsilons are to exact ones."""

"""De et al. 2022: figures of sweeps, audits of thousands of models, many chips on paper."""

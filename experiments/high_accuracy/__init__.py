"""De et al. 2022: sweeps, audits of thousands of models, many chips on paper, how settings were chosen."""

"""Studies after De et al. 2022: figures of sweeps, audits of many models, clips and settings."""

"""The audit's parts: many models at once, canaries, phases, scores on disk, pictures."""

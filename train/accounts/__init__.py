"""Numbers without training: what is asked, what follows, beside others, and what runs have spent."""

"""Numbers without training: questions and answers, others beside them, what runs have spent."""

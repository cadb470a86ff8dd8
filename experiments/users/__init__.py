"""Training that protects people with several examples each."""

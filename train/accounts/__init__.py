"""What training costs, and what finished runs have spent."""

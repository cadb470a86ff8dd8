"""What training draws from, and which steps draw it."""

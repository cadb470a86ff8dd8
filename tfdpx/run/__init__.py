"""What one training has used and spent: its seeds, its account, its data, its checkpoint."""

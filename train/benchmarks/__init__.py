"""What a private step costs, measured and on paper."""

"""Private fine-tuning of few weights against all of them."""

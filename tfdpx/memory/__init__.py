"""How large a pass may be: free memory, and what a traced pass takes."""

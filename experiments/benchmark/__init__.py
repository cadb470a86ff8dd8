"""The cost of privacy, measured against ordinary Keras and against peers."""

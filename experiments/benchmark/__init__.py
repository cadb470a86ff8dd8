"""What privacy costs, measured against ordinary Keras and against peers."""

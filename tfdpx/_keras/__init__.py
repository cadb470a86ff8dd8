"""The hook into Keras, and the private names of Keras and TensorFlow: nothing else uses them."""

"""A run that ends in the middle, as a killed one does."""

import keras


class Killed(Exception):
    """What ends it."""


class KillAfter(keras.callbacks.Callback):
    """Raises `Killed` when the model's optimizer has counted so many updates."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.run.updates == self.updates:
            raise Killed

"""A line where the first update of a `fit` takes long, and the time that it took."""

import contextlib
import threading
import time

import keras

# Seconds of silence.
_PATIENCE = 5.0


class FirstUpdate(keras.callbacks.Callback):
    """Says that the private step is being built, if that takes longer than some seconds."""

    def __init__(self):
        super().__init__()
        self._begin = self._timer = None
        self._said = False

    def on_train_begin(self, logs=None):
        """Starts to wait, unless `fit` is silent."""
        if self.params.get("verbose"):
            self._begin = time.monotonic()
            self._timer = threading.Timer(_PATIENCE, self._say)
            self._timer.daemon = True
            self._timer.start()

    def on_train_batch_end(self, batch, logs=None):
        """Says how long the first update took."""
        if self._timer is None:
            return
        self.end()
        if self._said:
            print(f"The first update took {time.monotonic() - self._begin:.0f} s.", flush=True)

    def end(self):
        """Says nothing from here on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self):
        self._said = True
        print(
            f"\nThe private step of model '{self.model.name}' is being built for its first update: "
            "traced, proved and compared with batches of one example. Layers that loop (LSTM, "
            "GRU) take longest.",
            flush=True,
        )


@contextlib.contextmanager
def announced(model, arguments):
    """Around a `fit`: has a `FirstUpdate` among its callbacks where the step is not built.

    Args:
        model: The compiled `keras.Model`.
        arguments: Dict of the arguments of `fit`; `callbacks` may be replaced.
    """
    given = arguments.get("callbacks")
    if model.train_function is not None or isinstance(given, keras.callbacks.CallbackList):
        yield
        return
    callback = FirstUpdate()
    arguments["callbacks"] = [callback, *(given or [])]
    try:
        yield
    finally:
        callback.end()

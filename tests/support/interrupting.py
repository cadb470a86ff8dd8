"""Ctrl-C at a chosen update."""

import contextlib
import signal

import keras
import pytest


@contextlib.contextmanager
def ctrl_c_after(update, times=1):
    """Sends this process Ctrl-C so many times after the given update of any `fit`."""
    end = keras.callbacks.CallbackList.on_train_batch_end

    def ended(self, *args, **kwargs):
        end(self, *args, **kwargs)
        if int(self._model.optimizer.iterations) == update:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup` and `&` ignore it.
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keras.callbacks.CallbackList, "on_train_batch_end", ended)
            yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What Ctrl-C does to a run: it ends after the update under way, saved, in one line."""

import contextlib
import shlex
import signal
import sys
import threading

import keras

from tfdpx.train.run import checkpoint

# As shells have it: 128 and the number of the signal.
STATUS = 130


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after `updates` updates of which a save holds all."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates


class SavingInterruption(keras.callbacks.Callback):
    """Has Ctrl-C wait for the update under way and save it; a second Ctrl-C ends at once.

    So does the first before an update was made, where nothing is to be saved.

    Args:
        save: Function without arguments, called between two updates.
    """

    def __init__(self, save):
        super().__init__()
        self._save, self._asked, self._trained = save, False, False

    @contextlib.contextmanager
    def waiting(self):
        """Around `fit`; raises `Interrupted`."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield  # Somebody else decides what Ctrl-C does, such as `nohup`.
            return
        signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._asked:  # In the last epoch, which was saved as it ended.
            raise self._interrupted()

    def _ask(self, number, frame):
        del number, frame
        if self._asked or not self._trained:
            raise KeyboardInterrupt
        self._asked = True

    def on_train_batch_begin(self, batch, logs=None):
        """Ends the training between two updates, if that was asked for."""
        del batch, logs
        if self._asked:
            self._save()
            raise self._interrupted()

    def on_train_batch_end(self, batch, logs=None):
        """From here on there is something to save."""
        del batch, logs
        self._trained = True

    def _interrupted(self):
        return Interrupted(int(self.model.optimizer.iterations))


@contextlib.contextmanager
def ending_in_a_line(program, workdir):
    """Within it, Ctrl-C ends the program with a line on what is kept, and how to resume.

    Args:
        program: String, such as "classify".
        workdir: String, the folder of the run.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        command = f"python -m tfdpx.train.{program} --workdir={shlex.quote(workdir)} --resume"
        if not checkpoint.begun(workdir):
            text = "interrupted before the first update; start it again with the same command."
        elif isinstance(error, Interrupted):
            text = f"interrupted at update {error.updates}; nothing is lost. Go on: {command}"
        else:
            text = (
                "interrupted; what was saved is whole, and updates after it are made again. "
                f"Go on: {command}"
            )
        end(program, text)


def end(program, text):
    """Ends an interrupted program with a line."""
    print("\n" * sys.stdout.isatty(), end="", flush=True)
    print(f"tfdpx.train.{program}: {text}", file=sys.stderr, flush=True)
    sys.exit(STATUS)

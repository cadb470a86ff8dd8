"""The process of one library: trains the digits, or makes updates when the parent asks for them.

The module of each library passes itself to `main`. It must define `versions()`; `digits(seed)`,
which returns a dict; and `training(case, mode)`, an object with two methods. `step()` makes one
update on one batch, and `epoch()` makes an epoch of updates. Both return after the last update;
they may return the seconds that they took.
"""

import json
import os
import sys
import time


def main(library):
    """Does the task in the first argument of the command line. Answers are lines of JSON."""
    # Answers have a separate stream: libraries print to the standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    if "seed" in task:
        run = library.digits(**task)
        print(json.dumps({**run, "versions": library.versions()}), file=answers)
        return
    imported, began = resident_mib("VmRSS"), clocks()
    training = library.training(**task)
    training.step()
    print(json.dumps(since(began)), file=answers)
    for line in sys.stdin:
        if line.strip() == "memory":
            answer = {"imported_mib": imported, "peak_mib": resident_mib("VmHWM")}
        else:
            began = clocks()
            seconds = getattr(training, line.strip())()
            answer = since(began)
            answer["seconds"] = seconds or answer["seconds"]
        print(json.dumps(answer), file=answers)


def clocks():
    """Returns the clock in seconds, and the CPU seconds of all threads of this process."""
    return time.perf_counter(), time.process_time()


def since(began):
    """Returns a dict of the clock and CPU seconds since `began`, an earlier result of `clocks`."""
    seconds, of_cpu = (now - then for now, then in zip(clocks(), began, strict=True))
    return {"seconds": seconds, "cpu_seconds": of_cpu}


def stopwatch(keras):
    """Returns a callback, for Keras 2 or 3, that notes two moments in seconds from now.

    The attribute `first` is the end of the first update, and `epoch` the end of the last epoch.
    `epoch` does not include the end of `fit`, which sometimes sleeps as it releases its data.
    """
    began = time.perf_counter()

    class Stopwatch(keras.callbacks.Callback):
        first = epoch = None

        def on_train_batch_end(self, batch, logs=None):
            self.first = self.first or time.perf_counter() - began

        def on_epoch_end(self, epoch, logs=None):
            self.epoch = time.perf_counter() - began

    return Stopwatch()


def resident_mib(field):
    """Returns the resident memory of this process in MiB, a float.

    If `field` is `VmRSS`, it is the present value; if `VmHWM`, the peak.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))

"""One library in one process: trains the digits, or makes updates when the parent asks for them.

A module of a library calls `main` with itself. It has `versions()`; `digits(seed)`, which returns a
dict; and `training(case, mode)`, an object with `step()`, which makes one update of one batch, and
`epoch()`, which makes one epoch of them. Each returns after its last update, or the seconds of it.
"""

import json
import os
import sys
import time


def main(library):
    """Does the task of the first argument. Answers are lines of JSON."""
    # The output of libraries must not be taken for an answer.
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
    """Returns seconds of time, and of the CPU in all threads of this process."""
    return time.perf_counter(), time.process_time()


def since(began):
    """Returns both since `began`, an earlier result of `clocks`."""
    seconds, of_cpu = (now - then for now, then in zip(clocks(), began, strict=True))
    return {"seconds": seconds, "cpu_seconds": of_cpu}


def stopwatch(keras):
    """Returns a callback of Keras 2 or 3 with `first` and `epoch`, in seconds from now.

    `first` is the end of the first update; `epoch` is the end of the last epoch, before `fit`
    releases its data: TensorFlow sometimes sleeps then.
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
    """Returns resident memory of this process in MiB: `VmRSS`, now; `VmHWM`, its peak."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))

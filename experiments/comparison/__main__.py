"""Compares tfdpx with its peers: trains a classifier of digits, and times updates of models.

    make compare                   creates the peers' environments first
    make compare ARGS=--quick      one seed, few repeats, each peer's first mode

Each library has its own environment and its own processes, and all use the same two cores. First,
each library trains a classifier of digits with the same privacy budget, in the way that its
documentation shows. Then the updates of several models are timed; ordinary and private updates take
turns, on two cores and then on one. On one core CPU seconds are counted, which depend less on other
programs. If a library has several modes, the fastest one on this machine is used. The program
writes results.json, comparison.md and comparison.png to `--output`; a later run adds its parts to
results.json. The last line of the standard output is one JSON object.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import threading

from experiments.comparison import cases, report

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The libraries and their modes. The first mode is usually the fastest.
LIBRARIES = {
    "tfdpx": ("default",),
    "opacus": ("hooks", "ghost", "functorch", "ew"),
    "jax-privacy": ("microbatch 1", "microbatch 8", "microbatch 32"),
    "tensorflow-privacy": ("model", "vectorized", "fast clipping"),
}
# Hides accelerators and messages.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
PARTS = ("modes", "digits", *cases.CASES)
# Seconds: the limit for an answer, the limit for an answer in `modes`, and the limit for a step. A
# step above its limit is timed only once.
LIMIT, TRIAL, SLOW = 600, 90, 5.0


def main():
    """Runs the parts of the comparison, and writes the report after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="One seed and few repeats.")
    parser.add_argument("--parts", help=f"Of {', '.join(PARTS)}; if quick, all but the first.")
    parser.add_argument("--libraries", help="Separated by commas. Default: all that are installed.")
    parser.add_argument("--environments", default=".venv-compare", help="A folder.")
    parser.add_argument("--output", default="runs/comparison", help="A folder.")
    flags = parser.parse_args()
    if not pathlib.Path("/proc/self/status").exists():
        parser.error("The comparison reads memory from /proc, which only Linux has.")
    output = pathlib.Path(flags.output)
    output.mkdir(parents=True, exist_ok=True)
    file = output / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results |= {"machine": machine(), "settings": settings()}
    names = flags.libraries.split(",") if flags.libraries else LIBRARIES
    pythons = {name: _python(name, flags.environments) for name in names}
    pythons = {name: python for name, python in pythons.items() if python.exists()}
    for part in flags.parts.split(",") if flags.parts else PARTS[flags.quick :]:
        began = os.getloadavg()[0]
        if part == "modes":
            for case in cases.CASES:
                figures = results.setdefault(part, {}).setdefault(case, {})
                figures |= modes(case, pythons)
        else:
            if part == "digits":
                figures = digits(pythons, seeds=1 if flags.quick else 3)
            else:
                tried = results.get("modes", {}).get(part, {})
                figures = times(part, pythons, tried, *(3, 1) if flags.quick else (7, 3))
                cpu_seconds(part, pythons, figures, 3 if flags.quick else 7)
            results[part] = {**results.get(part, {}), **figures}
        results.setdefault("load", {})[part] = [began, os.getloadavg()[0]]
        file.write_text(json.dumps(results, indent=1) + "\n")
    (output / "comparison.md").write_text(report.tables(results))
    report.draw(results, output / "comparison.png")
    print(report.tables(results))
    print(json.dumps(report.figures(results)))


def machine():
    """Returns a dict that describes the machine, for example its processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": model,
        "cores_used": len(_cores()),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
    }


def settings():
    """Returns a dict of the constants in `cases`, with lower-case names."""
    return {name.lower(): value for name, value in vars(cases).items() if name.isupper()}


def modes(case, pythons):
    """Returns `{library: {mode: result}}` for libraries with several modes.

    A result is the seconds of a private step, or a text if the mode failed.
    """
    seconds = {}
    for name, python in pythons.items():
        for mode in LIBRARIES[name] if len(LIBRARIES[name]) > 1 else ():
            _say(f"{case}, mode: {name}, {mode}")
            try:
                worker = Worker(name, python, {"case": case, "mode": mode})
                worker.answer(TRIAL)
                steps = [worker.ask("step", TRIAL)["seconds"] for _ in range(3)]
                worker.end()
                seconds.setdefault(name, {})[mode] = min(steps)
            except Failed as failure:
                seconds.setdefault(name, {})[mode] = str(failure)
    return seconds


def digits(pythons, seeds):
    """Trains the digits with each library and seed. Returns `{library: [result, ...]}`."""
    runs = {name: [] for name in pythons}
    for seed in range(seeds):
        for name, python in pythons.items():
            _say(f"digits, seed {seed}: {name}")
            worker = Worker(name, python, {"seed": seed})
            runs[name].append(worker.answer())
            worker.end()
    return runs


def times(case, pythons, tried, repeats, epochs):
    """Returns `{library: figures}`: a dict of the seconds and the memory of a library's updates.

    Args:
        case: One of `cases.CASES`.
        pythons: Dict from a library to the path of its Python.
        tried: The result of `modes`.
        repeats: Int, how often a step is timed.
        epochs: Int, how often an epoch is timed.
    """
    figures, workers = {}, {}
    for name, python in pythons.items():
        works = {m: s for m, s in tried.get(name, {}).items() if not isinstance(s, str)}
        first = LIBRARIES[name][0]  # Preferred unless another mode is more than 5% faster.
        mode = min(works, key=lambda m: works[m] * (0.95 if m == first else 1), default=first)
        figures[name] = {"mode": mode}
        for kind in ("private", "ordinary"):
            _say(f"{case}, first step: {name}, {mode if kind == 'private' else kind}")
            task = {"case": case, "mode": mode if kind == "private" else kind}
            try:
                worker = Worker(name, python, task)
                figures[name][kind] = {"first": worker.answer()["seconds"], "step": [], "epoch": []}
            except Failed as failure:
                figures[name] = {"failure": str(failure)}
                break
            workers[name, kind] = worker
    order, slow = random.Random(0), set()
    for what, turns in (("step", repeats), ("epoch", epochs)):
        _say(f"{case}: {turns} turns of each {what}")
        for turn in range(turns + 1):  # The first turn is not timed.
            for key in order.sample(list(workers), len(workers)):
                name, kind = key
                if "failure" in figures[name] or (key in slow and turn != 1):
                    continue
                try:
                    seconds = workers[key].ask(what)["seconds"]
                except Failed as failure:
                    figures[name] = {"failure": str(failure)}
                    continue
                if what == "step" and seconds > SLOW:
                    slow.add(key)
                if turn:
                    figures[name][kind][what].append(seconds)
    for (name, kind), worker in workers.items():
        if "failure" not in figures[name]:
            figures[name][kind] |= worker.ask("memory")
        worker.end()
    return figures


def cpu_seconds(case, pythons, figures, repeats):
    """Adds CPU seconds on one thread, of the first and of later steps, to the result of `times`."""
    for name, of_library in figures.items():
        if "failure" in of_library:
            continue
        _say(f"{case}, one thread: {name}")
        kinds, workers = ("private", "ordinary"), {}
        for kind in kinds:
            mode = of_library["mode"] if kind == "private" else kind
            workers[kind] = Worker(name, pythons[name], {"case": case, "mode": mode}, cores=1)
            of_library[kind]["cpu_first"] = workers[kind].answer()["cpu_seconds"]
            of_library[kind]["cpu_step"] = []
        is_slow = of_library["private"]["step"][0] > SLOW
        for turn in range(1 if is_slow else repeats + 1):
            for kind in kinds:
                answer = workers[kind].ask("step")
                if turn or is_slow:
                    of_library[kind]["cpu_step"].append(answer["cpu_seconds"])
        for worker in workers.values():
            worker.end()


class Failed(Exception):
    """Raised when a library fails. The message is short."""


class Worker:
    """A process that runs a library. It answers each line of input with a line of JSON."""

    def __init__(self, library, python, task, cores=2):
        module = f"experiments.comparison.of_{library.replace('-', '_')}"
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(task)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            # Every library starts as many threads as the process has cores.
            preexec_fn=lambda: os.sched_setaffinity(0, _cores()[-cores:]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said = []
        # Reads the standard error: a library with many warnings would stop at a full pipe.
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self._process.stderr:
            if line.strip():
                self._said = [*self._said[-20:], line.strip()]

    def ask(self, what, limit=LIMIT):
        """Sends a line and returns the answer, or raises `Failed` after `limit` seconds."""
        try:
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` reports the reason.
        return self.answer(limit)

    def answer(self, limit=LIMIT):
        """Returns the next line of output, parsed, or raises `Failed` after `limit` seconds."""
        clock = threading.Timer(limit, self._process.kill)
        clock.start()
        line = self._process.stdout.readline()
        clock.cancel()
        if line:
            return json.loads(line)
        code = self._process.wait()
        if code == -9:
            raise Failed(f"above {limit} s")
        last = self._said[-1] if self._said else f"exit status {code}"
        raise Failed(last.removeprefix("NotImplementedError: "))

    def end(self):
        """Closes the input of the process, so it ends, and waits for it."""
        self._process.stdin.close()
        self._process.wait()


def _cores():
    """Returns the numbers of the two cores that every library uses."""
    return sorted(os.sched_getaffinity(0))[:2]


def _python(library, environments):
    if library == "tfdpx":
        return pathlib.Path(sys.executable)
    return ROOT / environments / library / "bin" / "python"


def _say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""The thread pool: how many threads there are, where none can be started, and at the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.core.machine import available_cores

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux has /proc and limits of address space")


def run_python(code: str, *arguments: str, **environment: str) -> None:
    """Runs code in a process of its own, where OMP_NUM_THREADS is as `environment` says; fails if it does, or hangs."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# Its argument: how many MiB there are for stacks of threads, of which 1023 are wanted.
WITHOUT_THREADS = """
import os, resource, sys, time
import numpy as np
import billfish as bf

def helpers():
    return len(os.listdir("/proc/self/task")) - before

w = np.random.default_rng(1).standard_normal((256, 256), np.float32)  # one slice, for which Python starts no thread
q = bf.quantize(w, "q4_0")
x = np.ones((4, 256), np.float32)
bf.set_threads(1)
expected = bf.quantized_linear(x, q, activations="q8")
before = len(os.listdir("/proc/self/task"))
_, hard = resource.getrlimit(resource.RLIMIT_AS)
pages = int(open("/proc/self/statm").read().split()[0])
room = int(sys.argv[1]) << 20
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
bf.set_threads(1024)
assert np.array_equal(bf.quantized_linear(x, q, activations="q8"), expected)
started = helpers()
assert started < 200, started
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert np.array_equal(bf.quantized_linear(x, q, activations="q8"), expected)
assert helpers() == started, "asked again at a product"
bf.set_threads(3)
assert np.array_equal(bf.quantized_linear(x, q, activations="q8"), expected)
deadline = time.monotonic() + 60
while helpers() != 2:  # a thread that has ended is listed for a moment more
    assert time.monotonic() < deadline, helpers()
    time.sleep(0.01)
"""


@pytest.mark.promise("threads", "if a thread cannot be started, the others do its work")
@LINUX
@pytest.mark.parametrize("megabytes", [1, 100])
def test_goes_on_with_the_threads_that_start(megabytes):
    run_python(WITHOUT_THREADS, str(megabytes))


# Its arguments: `activations`, the rows of x, and the library of no_memory.c.
WITHOUT_MEMORY = """
import ctypes, sys
import numpy as np
import billfish as bf

q = bf.quantize(np.random.default_rng(1).standard_normal((8192, 32), np.float32), "q4_0")
x = np.ones((int(sys.argv[2]), 32), np.float32)
bf.set_threads(4)
faults = ctypes.CDLL(sys.argv[3])

def multiply():
    return bf.quantized_linear(x, q, activations=sys.argv[1])

expected = multiply()
for _ in range(1000):
    faults.no_memory(1)
    try:
        multiply()
        raise AssertionError("a product without memory")
    except MemoryError:
        faults.no_memory(0)
    if faults.refusals_in_helpers() > 20:
        break
assert faults.refusals_in_helpers() > 20
assert np.array_equal(multiply(), expected)
"""


@LINUX
@pytest.mark.compile
@pytest.mark.parametrize(("activations", "rows"), [("exact", 64), ("q8", 16)])
def test_no_memory_in_a_helper_is_an_error_of_the_call(activations, rows, tmp_path):
    source, library = Path(__file__).parents[2] / "support" / "no_memory.c", str(tmp_path / "no_memory.so")
    subprocess.run(["cc", "-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", library], check=True)
    run_python(WITHOUT_MEMORY, activations, str(rows), library, LD_PRELOAD=library)


DAEMONS = """
import threading
import numpy as np
import billfish as bf

q = bf.quantize(np.ones((2048, 1024), np.float32), "q4_0")
x = np.ones((8, 1024), np.float32)
bf.set_threads(4)
started = threading.Barrier(4)

def multiply():
    started.wait()
    while True:
        bf.quantized_linear(x, q, activations="q8")

for _ in range(3):
    threading.Thread(target=multiply, daemon=True).start()
started.wait()
bf.quantized_linear(x, q, activations="q8")
"""


@pytest.mark.promise("threads", "a process exits while daemon threads multiply")
@pytest.mark.parametrize("_", range(4))
def test_the_process_ends_while_daemon_threads_multiply(_):
    run_python(DAEMONS)


# Callers that begin loops at any time, change the number of threads meanwhile, and fail now and then.
MANY_CALLERS = """
import random, threading
import numpy as np
from billfish.backends.cpu import _cpu

wrong = []

def call(seed):
    chance = random.Random(seed)
    for loop in range(200):
        count = chance.choice((1, 2, 7, 64, 1000))
        fails = chance.randrange(count) if chance.random() < 0.2 else None
        seen = np.zeros(count, np.int64)

        def body(first, last):
            seen[first:last] += 1
            if fails is not None and first <= fails < last:
                raise KeyError((seed, loop))

        try:
            _cpu.parallel_for(count, body)
            if fails is not None or not (seen == 1).all():
                wrong.append((seed, loop, fails, seen))
        except KeyError as error:
            if fails is None or error.args != ((seed, loop),) or seen.max() > 1:
                wrong.append((seed, loop, fails, error))
        if chance.random() < 0.02:
            _cpu.set_threads(chance.choice((1, 2, 3, 5, 12)))

_cpu.set_threads(3)
callers = [threading.Thread(target=call, args=(seed,)) for seed in range(12)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
assert not wrong, wrong[:3]
"""


@pytest.mark.promise("threads", "callers that share the threads get their own pieces and errors")
def test_many_callers_share_the_threads():
    run_python(MANY_CALLERS)


# Each loop has two pieces that wait for each other, so another thread than the caller must come.
FOR_BOTH = """
import threading
from billfish.backends.cpu import _cpu

_cpu.set_threads(4)
both = threading.Barrier(2)
met = []

def call():
    for _ in range(50):
        together = threading.Barrier(2)
        both.wait(timeout=60)
        _cpu.parallel_for(2, lambda first, last: together.wait(timeout=60))
    met.append(True)

callers = [threading.Thread(target=call) for _ in range(2)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
assert met == [True, True]
"""


def test_helpers_work_for_two_callers_at_once():
    run_python(FOR_BOTH)


# Two threads are two callers, and the helper comes again when one is left. In /proc "S" is a thread that sleeps.
NO_MORE_AT_WORK = """
import os, threading, time
from billfish.backends.cpu import _cpu

_cpu.set_threads(2)
before = set(os.listdir("/proc/self/task"))
_cpu.parallel_for(2, lambda first, last: None)
helper = int(*set(os.listdir("/proc/self/task")) - before)
together = threading.Barrier(2)
at_work = [set() for _ in range(40)]  # of each loop

def call():
    for seen in at_work:
        def body(first, last):
            seen.add(threading.get_native_id())
            if first == 0:
                together.wait(timeout=60)
            time.sleep(0.001)  # another thread that is awake has the time to draw a piece
        _cpu.parallel_for(16, body)

callers = [threading.Thread(target=call) for _ in range(2)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
# The helper works until it has seen both callers, and if one of them lost its core for long.
assert sum(helper in seen for seen in at_work) < 10, (helper, at_work)
time.sleep(0.2)
together.reset()
_cpu.parallel_for(2, lambda first, last: together.wait(timeout=60))
"""


@LINUX
@pytest.mark.promise("threads", "two callers on two threads have one each")
def test_no_more_threads_work_than_were_set():
    run_python(NO_MORE_AT_WORK)


# A helper has a piece in hand and does not go on, as if another process had its core.
HELD_UP = """
import threading, time
from billfish.backends.cpu import _cpu

PIECES = 32

def sleeps(thread):
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "S"

_cpu.set_threads(2)
caller = threading.get_native_id()
held, go_on = threading.Event(), threading.Event()
done = []

def body(first, last):
    if threading.get_native_id() == caller:
        held.wait(timeout=60)
    elif not held.is_set():
        held.set()
        go_on.wait(timeout=60)
    done.append(first)

def watch():
    while len(done) < PIECES - 1:
        time.sleep(0.001)
    often = 0
    while often < 20:  # in succession
        often = often + 1 if sleeps(caller) else 0
        time.sleep(0.001)
    assert len(done) == PIECES - 1
    go_on.set()

watcher = threading.Thread(target=watch)
watcher.start()
_cpu.parallel_for(PIECES, body)
watcher.join()
assert go_on.is_set() and sorted(done) == list(range(PIECES))
"""


@LINUX
@pytest.mark.promise("threads", "a thread that lost its core costs the others no processor time")
def test_the_caller_sleeps_while_a_helper_is_held_up():
    run_python(HELD_UP)


# Children of a process whose other threads are in loops: each has a helper of its own.
FORKED = """
import os, threading
from billfish.backends.cpu import _cpu

_cpu.set_threads(2)
stop = threading.Event()

def call():
    while not stop.is_set():
        _cpu.parallel_for(64, lambda first, last: None)

callers = [threading.Thread(target=call) for _ in range(3)]
for caller in callers:
    caller.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        together = threading.Barrier(2)
        _cpu.parallel_for(2, lambda first, last: together.wait(timeout=60))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for caller in callers:
    caller.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_has_helpers_while_its_parent_is_in_loops():
    run_python(FORKED)


# In a process of its own: there is no way back from torch's threads.
WITH_TORCH = """
import os, threading, time
import numpy as np
import torch
import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.torch_threads import share_torch_threads

def threads_of_process():
    return len(os.listdir("/proc/self/task"))

rng = np.random.default_rng(1)
x = rng.standard_normal((9, 512), np.float32)
cases = [(bf.quantize(rng.standard_normal((300, 512), np.float32), name), how)
         for name in ("q4_0", "mxfp4", "q6_k", "u4b8") for how in ("q8", "q16", "exact")]
bf.set_threads(3)
expected = [bf.quantized_linear(x, q, activations=how) for q, how in cases]

def check():
    for (q, how), y in zip(cases, expected):
        found = bf.quantized_linear(torch.from_numpy(x), q, activations=how).numpy()
        assert np.array_equal(found.view(np.uint32), y.view(np.uint32)), (q.format.name, how)

torch.set_num_threads(2)
torch.ones(1 << 20).exp()  # torch starts its threads
before = threads_of_process()
check()
assert share_torch_threads()
deadline = time.monotonic() + 60
while threads_of_process() != before - 2:  # our own have ended, and none has come; an ended one is listed for a moment
    assert time.monotonic() < deadline, (before, threads_of_process())
    time.sleep(0.01)
for torch_threads, ours in ((2, 2), (3, 2), (2, 5), (4, 1)):
    torch.set_num_threads(torch_threads)
    bf.set_threads(ours)
    check()
torch.set_num_threads(1)
bf.set_threads(6)
check()
assert threads_of_process() >= before + 2, "torch has one thread, and we have six"
torch.set_num_threads(2)
bf.set_threads(2)
torch.set_flush_denormal(True)
check()
many = [threading.Thread(target=check) for _ in range(4)]
for thread in many:
    thread.start()
for thread in many:
    thread.join()
child = os.fork()  # OpenMP has no threads there, and would wait for them
if child == 0:
    y = bf.quantized_linear(x, cases[0][0], activations="q8")
    os._exit(0 if np.array_equal(y, expected[0]) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@LINUX
def test_torch_and_we_share_threads():
    run_python(WITH_TORCH)


@LINUX
def test_who_has_no_openmp_shares_nothing():
    assert not _cpu.share_threads_of("/nowhere/libtorch_cpu.so")
    assert not _cpu.share_threads_of(_cpu.__file__)


CHANGES = """
import os
import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.core.machine import available_cores

assert bf.get_format("q4_0")  # any name of billfish tells core.machine what native code knows
assert _cpu.threads() == available_cores() == 3
os.environ["OMP_NUM_THREADS"] = "5"
assert _cpu.threads() == available_cores() == 3
child = os.fork()
if child == 0:
    os._exit(0 if _cpu.threads() == available_cores() == 5 else 1)
assert os.waitpid(child, 0)[1] == 0
assert _cpu.threads() == 3
bf.set_threads(7)
assert (_cpu.threads(), available_cores()) == (7, 3)
bf.set_threads(0)
assert _cpu.threads() == available_cores() == 5
for count, text in [(2, "2,4"), (1024, "1000000")]:
    os.environ["OMP_NUM_THREADS"] = text
    bf.set_threads(0)
    assert _cpu.threads() == count
for text in ["", "0", "-1", "many"]:
    os.environ["OMP_NUM_THREADS"] = text
    bf.set_threads(0)
    assert _cpu.threads() == _cpu.available_cores("")
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    bf.set_threads(0)
    assert _cpu.threads() == available_cores() == 1
"""


@pytest.mark.promise("threads", "CPU kernels and chat templates work after a fork")
def test_changed_defaults_are_seen_after_a_fork_and_by_set_threads():
    run_python(CHANGES, OMP_NUM_THREADS="3")


V1 = "30 23 0:26 {group} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "29 23 0:25 {group} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
CPU = "sys/fs/cgroup/cpu,cpuacct"
ALL = "sys/fs/cgroup"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"

# name: (lines of mountinfo, lines of /proc/self/cgroup, files, cores)
CGROUPS = {
    "nothing is mounted": ("", "0::/\n", {}, 0),
    "no /proc": (None, None, {f"{ALL}/cpu.max": "100000 100000"}, 0),
    "v2": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "200000 100000\n"}, 2),
    "v2, rounded up": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "250001 100000\n"}, 3),
    "v2, less than one core": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "1000 100000\n"}, 1),
    "v2, no limit": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "max 100000\n"}, 0),
    "v2, the limit of a parent": (
        V2.format(group="/"),
        "0::/a/b/c\n",
        {
            f"{ALL}/a/cpu.max": "300000 100000",
            f"{ALL}/a/b/cpu.max": "max 100000",
            f"{ALL}/a/b/c/cpu.max": "800000 100000",
        },
        3,
    ),
    "v2, a namespace's own root": (V2.format(group="/"), "0::/\n", {f"{ALL}/cpu.max": "400000 100000"}, 4),
    "v2, a container's group": (V2.format(group="/box"), "0::/box\n", {f"{ALL}/cpu.max": "400000 100000"}, 4),
    "v2, below it": (
        V2.format(group="/box"),
        "0::/box/a\n",
        {f"{ALL}/cpu.max": "400000 100000", f"{ALL}/a/cpu.max": "100000 100000"},
        1,
    ),
    "v2, a group elsewhere": (V2.format(group="/box"), "0::/boxer/a\n", {f"{ALL}/cpu.max": "400000 100000"}, 4),
    "v2, nonsense": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "lots of it\n"}, 0),
    "v2, no period": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "200000"}, 0),
    "v2, a period of zero": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "200000 0"}, 0),
    "v2, empty": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": ""}, 0),
    "v2, more than any machine has": (V2.format(group="/"), "0::/a\n", {f"{ALL}/a/cpu.max": "1e300 1"}, 0),
    "v1": (
        V1.format(group="/"),
        "4:cpu,cpuacct:/a\n",
        {f"{CPU}/a/{QUOTA}": "150000\n", f"{CPU}/a/{PERIOD}": "50000\n"},
        3,
    ),
    "v1, no limit": (
        V1.format(group="/"),
        "4:cpu,cpuacct:/a\n",
        {f"{CPU}/a/{QUOTA}": "-1\n", f"{CPU}/a/{PERIOD}": "100000\n"},
        0,
    ),
    "v1, a parent and another controller": (
        MEMORY + V1.format(group="/"),
        "5:memory:/m\n4:cpu,cpuacct:/a/b\n0::/\n",
        {
            f"{CPU}/a/{QUOTA}": "100000",
            f"{CPU}/a/{PERIOD}": "100000",
            f"{CPU}/a/b/{QUOTA}": "200000",
            f"{CPU}/a/b/{PERIOD}": "100000",
            "sys/fs/cgroup/memory/m/cpu.max": "1 1",
        },
        1,
    ),
    "v1, a container's group": (
        V1.format(group="/docker/0a"),
        "4:cpu,cpuacct:/docker/0a\n",
        {f"{CPU}/{QUOTA}": "200000", f"{CPU}/{PERIOD}": "100000"},
        2,
    ),
    "v1 and v2": (
        V1.format(group="/") + V2.format(group="/"),
        "4:cpu:/a\n0::/a\n",
        {f"{CPU}/a/{QUOTA}": "600000", f"{CPU}/a/{PERIOD}": "100000", f"{ALL}/a/cpu.max": "500000 100000"},
        5,
    ),
    "lines of nonsense": ("\n-\n1 2 3\n - \n - cgroup2\n", ":\n4\n0:\n", {}, 0),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_cpu_quota_of_cgroups(tmp_path: Path, name: str) -> None:
    mounts, groups, files, cores = CGROUPS[name]
    texts = dict(files)
    if mounts is not None:
        texts |= {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups}
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert _cpu.quota_cores(str(tmp_path)) == cores
    assert _cpu.available_cores(str(tmp_path)) <= (cores or 1 << 20)
    if cores == 1:
        assert _cpu.available_cores(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("siblings", "processors", "cores"),
    [
        ({0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"}, [0, 1, 2, 3], 2),
        ({0: "0-1\n", 1: "0-1\n", 2: "2-3\n", 3: "2-3\n"}, [0, 1, 2, 3], 2),
        ({0: "0-1\n", 1: "0-1\n", 2: "2-3\n", 3: "2-3\n"}, [1, 2, 3], 2),
        ({0: "0-1\n", 1: "0-1\n"}, [1], 1),
        ({0: "0\n", 1: "1\n"}, [0, 1], 2),
        ({0: "0-7\n", 3: "0-7\n"}, [0, 3, 5], 2),  # 5 does not say
        ({0: "\n", 1: "many\n"}, [0, 1], 2),
        ({}, [4, 5, 6], 3),
    ],
)
def test_hyperthreads_of_a_core_count_once(tmp_path: Path, siblings, processors, cores) -> None:
    for processor, text in siblings.items():
        file = tmp_path / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert _cpu.physical_cores(processors, str(tmp_path)) == cores


def test_rows_are_sliced_for_as_many_threads_as_kernels_have_by_default():
    before = _cpu.threads()
    try:
        bf.set_threads(0)
        assert available_cores() == _cpu.threads()
    finally:
        _cpu.set_threads(before)

"""Queues that are forgotten, collected and forked while others use them: nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.sync_queue_kit import run_python

# Each prints where it hangs and ends by itself.
START = """
import faulthandler, gc, os, sys, tempfile, threading
faulthandler.dump_traceback_later(20, exit=True)
gc.disable()
BEFORE
from pillarbox.sync import files
from pillarbox.sync.queue import SqlQueue

def forget():
    queue = SqlQueue(tempfile.mkdtemp(dir=sys.argv[1]))
    queue.push("orders", "DELETE")
    queue.itself = queue
"""

COLLECTED_BEFORE_A_FORK = """
forget()
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""

COLLECTED_DURING_A_PUSH = """
forget()
queue = SqlQueue(sys.argv[1])
queue.push("orders", "DELETE")
pushing, is_closing = threading.Event(), threading.Event()
shared = queue.queue_file("orders")._shared
insert, close = files.insert_first, shared.close

def insert_and_collect(*args, **options):
    seq = insert(*args, **options)
    pushing.set()
    is_closing.wait()
    gc.collect()
    return seq

def close_then():
    is_closing.set()
    close()

files.insert_first, shared.close = insert_and_collect, close_then
thread = threading.Thread(target=queue.push, args=("orders", "DELETE"))
thread.start()
pushing.wait()
queue.close()
thread.join()
"""

FORKED_WHILE_A_FILE_IS_OPENED = """
queue = SqlQueue(sys.argv[1])
queue.push("orders", "DELETE")
opening, goes_on = threading.Event(), threading.Event()
path_of, subscribed = queue._path_of, files.subscribe(sys.argv[1], lambda: None)

class Slow(files.QueueFile):
    def __init__(self, *args, **options):
        opening.set()
        goes_on.wait()
        super().__init__(*args, **options)

from pillarbox.sync import queue as module
module.QueueFile = Slow
thread = threading.Thread(target=queue.waiting, args=("customers",))
thread.start()
opening.wait()

def listen():
    with files._changing:
        listening.set()
        goes_on.wait()

listening = threading.Event()
listener = threading.Thread(target=listen)
listener.start()
listening.wait()
child = os.fork()
if child == 0:
    module.QueueFile = files.QueueFile
    queue.push_many("orders", [("DELETE", [])])
    assert queue.waiting("orders") == 2
    queue.push_many("addresses", [("DELETE", [])])
    files.subscribe(sys.argv[1], lambda: None)()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
goes_on.set()
thread.join()
listener.join()
assert queue.waiting("customers") == 0
"""


@pytest.mark.parametrize(
    ("script", "before"),
    [
        pytest.param(COLLECTED_BEFORE_A_FORK, "os.register_at_fork(before=gc.collect)", id="collected before a fork"),
        pytest.param(COLLECTED_DURING_A_PUSH, "", id="collected during a push"),
        pytest.param(FORKED_WHILE_A_FILE_IS_OPENED, "", id="forked while a file is opened"),
    ],
)
def test_nobody_waits_for_ever(tmp_path: Path, script: str, before: str) -> None:
    done = run_python(START.replace("BEFORE", before) + script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_process_that_ends_closes_its_files(tmp_path: Path) -> None:
    # Handlers run in the opposite order: this one, registered before our package is imported, is the last.
    look = "import atexit; atexit.register(lambda: print(*os.listdir(sys.argv[1])))"
    script = "queue = SqlQueue(sys.argv[1])\nqueue.push('orders', 'DELETE')\n"
    done = run_python(START.replace("BEFORE", look) + script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "orders.db\n", "")
